"""The sides of the TPU benchmark answer and are recorded; here under another strategy and without torch_xla."""

import io
import json
import sys
import types

import pytest
import tpu_times

import torchstrategy as ts

OPTIONS = {"model": "transformer", "dropout": 0.0, "devices": None, "seed": 0, "batch_size": 2, "steps": 4}
OPTIONS |= {"optimizer": {"lr": 0.01}, "profile": True, "profile_steps": {"skip": 1, "record": 2}}


def stand_in_for_torch_xla(monkeypatch):
    modules = {name: types.ModuleType(f"torch_xla{name}") for name in ("", ".debug", ".debug.metrics")}
    modules[""].__version__, modules[""].debug = "0", modules[".debug"]
    modules[".debug"].metrics = modules[".debug.metrics"]
    modules[".debug.metrics"].counter_value = lambda _: None
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["loop", "fit"])
def test_a_side_is_timed_and_then_recorded(side, tmp_path, monkeypatch, capsys):
    stand_in_for_torch_xla(monkeypatch)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    monkeypatch.setattr(ts.cluster_resolver.TPUClusterResolver, "connect", lambda _: None)
    monkeypatch.setattr(ts, "TPUStrategy", lambda _: ts.MirroredStrategy(["cpu:0", "cpu:1"]))
    monkeypatch.setattr(sys, "argv", ["tpu_times.py", json.dumps(OPTIONS | {"side": side})])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"null\n{json.dumps({'trace': str(tmp_path)})}\nnull\n"))
    tpu_times.main()
    out, err = capsys.readouterr()
    version, first, recorded, last = map(json.loads, out.splitlines())
    assert version.endswith("torch_xla 0")
    assert set(first) == set(last) == {"seconds", "python_seconds", "compilations", "loss"}
    assert recorded == {}
    assert "Where the time of a step goes, in ms (means of 2 steps)" in err
    events = json.loads((tmp_path / "profile" / f"{side}.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    assert {"ts::replica 0", "ts::replica 1"} <= set(names)
