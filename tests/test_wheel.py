"""What the wheel and the sdist hold, and that the README's script runs from the wheel, under `torchrun` too."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """Return a folder with nothing but the installed wheel, to be put on PYTHONPATH."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", str(wheel), "--no-deps", "--target", str(folder))
    return folder


@pytest.fixture
def script(tmp_path):
    """Return the README's script as a file of its own, far from the checkout."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (code,) = [block for block in blocks if "strategy.run(" in block]  # the other one trains by fit
    path = tmp_path / "train.py"
    path.write_text(code, encoding="utf-8")
    return path


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=100)


def run(command, site, folder):
    """Run a command that sees the wheel instead of the checkout and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.end_to_end
def test_wheel_holds_the_library_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"torchstrategy"}
    assert "torchstrategy/py.typed" in names
    assert {stub.relative_to(ROOT).as_posix() for stub in (ROOT / "torchstrategy").rglob("*.pyi")} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_sdist_holds_no_large_data(tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        sizes = {member.name.split("/", 1)[1]: member.size for member in archive if member.isfile()}
    assert {"LICENSE", "README.md", "docs/index.md", "recipes/fit.py", "tests/test_wheel.py"} <= set(sizes)
    assert path.stat().st_size < 4e6
    assert {name for name, size in sizes.items() if size > 2e6} == set()


@pytest.mark.slow
def test_installed_copy_is_the_one_that_runs(site, tmp_path):
    printed = run([sys.executable, "-c", "import torchstrategy; print(torchstrategy.__file__)"], site, tmp_path)
    assert Path(printed.strip()).is_relative_to(site)
    assert "say what a job would see here" in run([sys.executable, "-m", "torchstrategy", "--help"], site, tmp_path)
    assert "say what a job would see here" in run([str(site / "bin" / "torchstrategy"), "--help"], site, tmp_path)


@pytest.mark.slow
def test_installed_copy_has_the_files_that_are_no_modules(site):
    checkout = ROOT / "torchstrategy"
    files = {path.relative_to(checkout) for path in checkout.rglob("*") if path.is_file()}
    data = {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}
    assert {"py.typed", "base/tf_names.csv", "conf/strategy/mirrored.yaml"} <= {path.as_posix() for path in data}
    assert {path for path in data if not (site / "torchstrategy" / path).is_file()} == set()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_program_is_type_checked_against_the_installed_copy(wheel, tmp_path):
    program = ROOT / "tests" / "typed_program.py"
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=100)
    python = str(environment / "bin" / "python")
    folder = Path(
        run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path, tmp_path).strip()
    )
    pip("install", str(wheel), "--no-deps", "--target", str(folder))
    (folder / "torch_and_others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")

    checked = subprocess.run(
        # torch's `backward` has no types
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--allow-untyped-calls",
            "--python-executable",
            python,
            str(program),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert checked.stdout == "Success: no issues found in 1 source file\n"
    assert len(run([python, str(program), "1", "2"], tmp_path, tmp_path).splitlines()) == 2


@pytest.mark.slow
def test_script_gives_the_same_losses_however_it_is_started(site, script, tmp_path):
    plain = losses(run([sys.executable, str(script)], site, tmp_path))
    assert len(plain) == 3
    assert plain[-1] < plain[0] / 2

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    assert losses(run(torchrun, site, tmp_path)) == pytest.approx(plain, rel=1e-4)

    two_replicas = tmp_path / "two_replicas.py"
    source = script.read_text(encoding="utf-8")
    assert "MirroredStrategy()" in source
    two_replicas.write_text(source.replace("MirroredStrategy()", 'MirroredStrategy(devices=["cpu:0", "cpu:1"])'))
    assert losses(run([sys.executable, str(two_replicas)], site, tmp_path)) == pytest.approx(plain, rel=1e-4)


def losses(printed):
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", printed)]
