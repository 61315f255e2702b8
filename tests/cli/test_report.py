import json

from torchstrategy.cli.host import Finding, as_json, as_text, has_failed

FINDINGS = [
    Finding("Job", "torchrun", "info", "not set"),
    Finding("Job", "a longer name", "ok", "fine"),
    Finding("Network", "store", "FAIL", "no answer\nfor seconds", "open the port"),
]


def test_text_is_aligned():
    assert as_text(FINDINGS) == (
        "Job\n"
        "        torchrun       not set\n"
        "  ok    a longer name  fine\n"
        "\n"
        "Network\n"
        "  FAIL  store          no answer\n"
        "                       for seconds\n"
        "                       -> open the port\n"
        "\n"
        "1 ok, 0 warn, 1 FAIL\n"
    )


def test_long_lines_are_wrapped():
    text = as_text([Finding("Job", "job", "ok", "word " * 60)])
    assert max(map(len, text.splitlines())) <= 120
    assert text.split().count("word") == 60


def test_json():
    report = json.loads(as_json(FINDINGS))
    assert report["status"] == "FAIL"
    assert report["findings"][2] == {
        "section": "Network",
        "name": "store",
        "status": "FAIL",
        "detail": "no answer\nfor seconds",
        "remedy": "open the port",
    }
    assert json.loads(as_json(FINDINGS[:2]))["status"] == "ok"
    assert json.loads(as_json([Finding("a", "b", "warn", "c")]))["status"] == "warn"


def test_only_failures_fail():
    assert has_failed(FINDINGS)
    assert not has_failed([*FINDINGS[:2], Finding("Job", "x", "warn", "y")])
