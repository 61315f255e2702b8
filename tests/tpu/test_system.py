"""The order of calls that tf programs for TPUs have, and what is said where it is another one."""

from tests.tpu import system_programs as programs

ORDER = "ts.tpu.experimental.initialize_tpu_system(resolver); strategy = ts.TPUStrategy(resolver)."


def test_order_of_tf(xla_process):
    found = xla_process(4, fresh=True).run(programs.in_tf_order)
    assert found["devices"] == ([], [f"/device:TPU:{index}" for index in range(4)])
    assert found["topology"] == ([4, 1, 1, 1], 1, 4)
    assert found["metadata"] == (4, 1, 4)
    assert found["knows_topology"]
    assert found["accelerators"] == {"TPU": 4}
    assert (found["replicas"], found["one_replica"]) == (4, 1)


def test_strategy_before_the_system(xla_process):
    message, num_replicas = xla_process(2, fresh=True).run(programs.strategy_first)
    assert message.startswith("The TPU system is not initialised. The order of calls is: resolver = ")
    assert message.endswith(ORDER)
    assert num_replicas == 2


def test_connect_makes_all_ready(xla_process):
    assert xla_process(2, fresh=True).run(programs.connects) == 2


def test_initialising_again(xla_process):
    said = xla_process(4, fresh=True).run(programs.initialises_again)
    assert "starts nothing anew" in said["nothing"]
    assert "Now these do: TPUStrategy" in said["strategy"]
    assert said["strategy"].endswith(ORDER)
    assert "Now these do: tensor of shape (3, 5)." in said["tensor"]
    assert "Now these do: Sequential (module)." in said["module"]
    assert "Now these do: Sequential (module), SGD (optimizer)." in said["optimizer"]
    assert said["deleted"] == "no error"


def test_initialising_after_a_tensor_of_the_program(xla_process):
    message = xla_process(4, fresh=True).run(programs.initialises_after_a_tensor_of_the_program)
    assert "before anything lives on its devices" in message
    assert "tensor of shape (7,)" in message


def test_shutting_down(xla_process):
    said = xla_process(4, fresh=True).run(programs.shuts_down)
    assert "is not initialised" in said["too early"]
    (line,) = said["log"]
    assert "TPUStrategy" in line
    assert "Linear (module)" in line
    for call in ("run", "scope"):
        assert "was shut down. Make the strategy, the model and the optimizer anew." in said[call]
    assert "is not initialised" in said["new strategy"]
    assert said["devices"] == []
    assert "Linear (module)" in said["with a module alive"]
    assert said["anew"] == [0, 1, 2, 3]
    assert said["quiet"] == []


def test_wrong_resolvers(xla_process):
    said = xla_process(4, fresh=True).run(programs.wrong_resolvers)
    for call, other in (("initialize_tpu_system", said[:2]), ("shutdown_tpu_system", said[2:])):
        assert other[0].startswith(f"UnimplementedError: {call} can't reach a TPU from another machine")
        assert other[1] == (
            "TypeError: cluster_resolver must be a ts.cluster_resolver.TPUClusterResolver. Received: "
            "TFConfigClusterResolver"
        )


NO_TPU = """
import os, sys
import torchstrategy as ts
for _ in range(2):  # torch_xla sets PJRT_DEVICE at the first
    try:
        ts.tpu.experimental.initialize_tpu_system(ts.cluster_resolver.TPUClusterResolver("local"))
    except ts.errors.NotFoundError as error:
        print(error)
print(ts.cluster_resolver.TPUClusterResolver("local").num_accelerators())
"""


def test_host_without_tpu(xla_program):
    done = xla_program(NO_TPU, PJRT_DEVICE=None, CPU_NUM_DEVICES=None)
    assert done.returncode == 0, done.stderr
    first, second, accelerators = done.stdout.splitlines()
    assert first == second
    assert first.startswith("This host has no TPU that torch_xla 2.")
    assert "set PJRT_DEVICE=CPU and CPU_NUM_DEVICES=4 before the program starts" in first
    assert accelerators == "{'TPU': 0}"
    assert "PJRT_DEVICE" not in done.stderr


WRONG_PAIR = """
import sys
import torchstrategy as ts
try:
    ts.tpu.experimental.initialize_tpu_system()
except ImportError as error:
    print(error)
print("torch_xla" in sys.modules)
"""


def test_wrong_pair_is_named_before_it_is_imported(xla_program, tmp_path, monkeypatch):
    metadata = tmp_path / "other" / "torch_xla-2.5.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-xla\nVersion: 2.5.0\n")
    monkeypatch.setenv("PYTHONPATH", str(metadata.parent))
    message, is_imported = xla_program(WRONG_PAIR).stdout.splitlines()
    assert message.startswith("torch_xla 2.5.0 does not fit to torch 2.")
    assert "it needs torch 2.5" in message
    assert is_imported == "False"


QUIET = """
import logging, os
import torchstrategy as ts
ts.tpu.experimental.initialize_tpu_system()
runtime = ts.TPUStrategy().runtime
import torch
value = runtime.upload([torch.ones(2)] * 4)
print(runtime.stack(runtime.enter(value, split=True).sum()).sum().item())
print(logging.getLogger().handlers, os.environ["TF_CPP_MIN_LOG_LEVEL"])
"""


def test_the_compiler_is_quiet(xla_program):
    done = xla_program(QUIET, TF_CPP_MIN_LOG_LEVEL=None)
    assert done.stdout.splitlines() == ["8.0", "[] 2"]
    assert [line for line in done.stderr.splitlines() if "torchstrategy" not in line] == []
    assert "Initialised the TPU system: 4 CPU devices, 4 of them here (torch_xla 2." in done.stderr


def test_the_compiler_speaks_if_it_is_asked_to(xla_program):
    done = xla_program(QUIET, TF_CPP_MIN_LOG_LEVEL="0")
    assert done.stdout.splitlines() == ["8.0", "[] 0"]
    assert "GSPMD" in done.stderr
