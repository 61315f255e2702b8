"""The manifests under docs/deploy/kubernetes: each pod's TF_CONFIG is rendered as Kubernetes does it, and read."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import torchstrategy as ts
from tests.recipes import layouts
from torchstrategy.base.addresses import ReservedPorts
from torchstrategy.cluster_resolver.detect import find_job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "deploy" / "kubernetes"
CLUSTERS = {
    "multi_worker": {"chief": 1, "worker": 2},
    "parameter_server": {"chief": 1, "worker": 2, "ps": 2},
}
INDEX = {
    "Job": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    "StatefulSet": "metadata.labels['apps.kubernetes.io/pod-index']",
}
PODS = [(name, role, i) for name, roles in CLUSTERS.items() for role, n in roles.items() for i in range(n)]
PODS += [(name, "evaluator", 0) for name in CLUSTERS]


def load(name):
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def find(documents, kind, name="train"):
    (found,) = [item for item in documents if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def workload(documents, role):
    (found,) = [item for item in documents if item["metadata"]["name"] == f"train-{role}"]
    return found


def container_of(document):
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return container


def environment(documents, document, index):
    """Return a container's variables: $(NAME) stands for a variable that is listed before."""
    values = {}
    for entry in container_of(document)["env"]:
        if "value" in entry:
            value = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], entry["value"])
        elif "configMapKeyRef" in entry["valueFrom"]:
            reference = entry["valueFrom"]["configMapKeyRef"]
            value = find(documents, "ConfigMap", reference["name"])["data"][reference["key"]]
        elif "secretKeyRef" in entry["valueFrom"]:
            value = "0f" * 16
        else:
            assert entry["valueFrom"]["fieldRef"]["fieldPath"] == INDEX[document["kind"]]
            value = str(index)
        values[entry["name"]] = value
    return values


@pytest.mark.parametrize(("name", "role", "index"), PODS)
def test_pod_knows_its_task(name, role, index):
    documents = load(name)
    environ = environment(documents, workload(documents, role), index)
    resolver = ts.cluster_resolver.TFConfigClusterResolver(environ=environ)
    assert (resolver.task_type, resolver.task_id) == (role, index)
    expected = {role: [f"train-{role}-{i}.train:2222" for i in range(n)] for role, n in CLUSTERS[name].items()}
    assert resolver.cluster_spec().as_dict() == expected
    if role == "ps":
        with pytest.raises(ValueError, match="TF_CONFIG says that this process is ps"):
            find_job(environ=environ)
        return
    job = find_job(environ=environ)
    if role == "evaluator":
        assert (job.rank, job.size) == (0, 1)
    else:
        assert (job.rank, job.size) == (index if role == "chief" else index + 1, 3)
        assert (job.address, job.port) == ("train-chief-0.train", 2222)


@pytest.mark.parametrize("name", CLUSTERS)
def test_names_of_pods_are_those_of_the_cluster(name):
    """Pods are named after what starts them and their index, and are found through the headless service."""
    documents = load(name)
    service = find(documents, "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    cluster = json.loads(find(documents, "ConfigMap")["data"]["cluster"])
    roles = [item["metadata"]["name"] for item in documents if item["kind"] in INDEX]
    assert roles == [f"train-{role}" for role in [*CLUSTERS[name], "evaluator"]]
    for role in [*CLUSTERS[name], "evaluator"]:
        document = workload(documents, role)
        spec, pod = document["spec"], document["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert container_of(document)["name"] == role
        assert container_of(document)["ports"] == [{"containerPort": 2222}]
        number = len(cluster.get(role, ["evaluator"]))
        if document["kind"] == "Job":
            assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", number, number)
            assert pod["spec"]["subdomain"] == service["metadata"]["name"]
            assert pod["spec"]["restartPolicy"] == "OnFailure"
        else:
            assert (spec["serviceName"], spec["replicas"]) == (service["metadata"]["name"], number)
            assert spec["selector"]["matchLabels"] == pod["metadata"]["labels"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_volumes_exist(name):
    documents = load(name)
    for document in documents:
        if document["kind"] in INDEX:
            pod = document["spec"]["template"]["spec"]
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            assert {mount["name"] for mount in container_of(document).get("volumeMounts", [])} == volumes
            for volume in pod.get("volumes", []):
                if "persistentVolumeClaim" in volume:
                    find(documents, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


@pytest.mark.parametrize(
    ("name", "role", "strategy"),
    [
        ("multi_worker", "chief", "MultiWorkerMirroredStrategy"),
        ("multi_worker", "worker", "MultiWorkerMirroredStrategy"),
        ("parameter_server", "chief", "ParameterServerStrategy"),
    ],
)
def test_command_is_a_recipe_with_its_options(name, role, strategy):
    container = container_of(workload(load(name), role))
    python, recipe, *options = container["command"]
    assert python == "python"
    assert (ROOT / recipe).exists()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose(Path(recipe).stem, options)
    assert config.strategy._target_ == f"torchstrategy.{strategy}"
    mounts = container["volumeMounts"]
    assert any(config.folder.startswith(mount["mountPath"]) for mount in mounts), "checkpoints are on a shared volume"


@pytest.mark.parametrize("role", ["worker", "ps"])
def test_servers_run_the_command_line(role):
    container = container_of(workload(load("parameter_server"), role))
    assert container["command"][:4] == ["python", "-m", "torchstrategy", "server"]
    if role == "ps":  # its checkpoints are on a shared volume
        (option,) = container["command"][4:]
        assert option.startswith(f"--checkpoint-dir={container['volumeMounts'][0]['mountPath']}/")


@pytest.mark.parametrize("role", CLUSTERS["parameter_server"])
def test_tasks_of_parameter_servers_have_the_secret(role):
    documents = load("parameter_server")
    environ = environment(documents, workload(documents, role), 0)
    assert len(bytes.fromhex(environ["TORCHSTRATEGY_SECRET"])) >= 16


@pytest.mark.slow
def test_torchrun_gets_a_train_job_from_the_variables_of_kubeflow_trainer(tmp_path):
    """Its command, on two nodes. Kubeflow's models read the manifest in tests/engines/test_kubeflow.py."""
    documents = load("train_job")
    job = find(documents, "TrainJob")["spec"]
    runtime = find(documents, "TrainingRuntime", job["runtimeRef"]["name"])["spec"]["template"]["spec"]
    (replicated,) = runtime["replicatedJobs"]
    mounts = container_of(replicated["template"])["volumeMounts"]
    torchrun, recipe, folder = job["trainer"]["command"]
    assert any(folder.startswith(f"folder={mount['mountPath']}/") for mount in mounts)
    with ReservedPorts(1) as ports:
        pet = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(ports.numbers[0])}
    pet |= {"PET_NNODES": str(job["trainer"]["numNodes"]), "PET_NPROC_PER_NODE": str(job["trainer"]["numProcPerNode"])}
    options = [str(ROOT / recipe), f"folder={tmp_path}/run", "epochs=1", "global_batch_size=2000"]
    command = [str(Path(sys.executable).with_name(torchrun)), *options]
    output = layouts.run_all([(command, {**pet, "PET_NODE_RANK": str(rank)}) for rank in range(2)], tmp_path)
    assert "num_workers = 2" in output
    assert "(torchrun's variables are set (RANK=0, WORLD_SIZE=2))" in output
    assert "Trained for 1 epochs, 3 steps." in output


def test_all_manifests_are_tested():
    assert {path.stem for path in FOLDER.iterdir()} == {*CLUSTERS, "train_job"}
