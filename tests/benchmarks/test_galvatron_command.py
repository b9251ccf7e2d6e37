from __future__ import annotations

import json

import pytest

from benchmarks.galvatron.__main__ import main, slower
from benchmarks.galvatron.cases import read_case
from profiles.errors import InputError


@pytest.fixture
def case_file(peer, tmp_path):
    """Writes a changed copy of a recorded case."""

    def write(name, change=dict):
        data = json.loads(next((peer / "inputs").glob(f"{name}*")).read_text())
        change(data)
        path = tmp_path / "inputs" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(data))
        return path

    return write


def test_the_answer_as_json_has_both_sides_under_the_same_costs(peer, capsys):
    paths = [str(next((peer / "inputs").glob(f"{name}*"))) for name in ("m06", "s10_layers064")]
    assert main([*paths, "--format", "json"]) == 0
    found, none = json.loads(capsys.readouterr().out)["cases"]
    assert found["case"].startswith("m06")
    assert found["found"] is True
    assert found["ours_iteration_s"] == pytest.approx(found["ours_under_peer_costs_s"], rel=1e-9)
    assert found["peer_iteration_s"] == pytest.approx(found["peer_under_peer_costs_s"], rel=1e-8)
    assert found["ours_iteration_s"] < 0.997 * found["peer_iteration_s"]
    assert found["ours_cpu_s"] * 100 < found["peer_cpu_s"]
    assert len(found["ours_config"]["tp_sizes_enc"].split(",")) == 32
    assert none["found"] is False
    assert none["ours_iteration_s"] is None
    assert none["proven"] is True
    assert none["proof"].startswith("no plan exists: of 11 families")


def test_the_text_names_both_plans(peer, capsys):
    assert main([str(next((peer / "inputs").glob("p07*")))]) == 0
    text = capsys.readouterr().out
    assert "ours: c4 24 x 1-1-8, vocabulary tp1" in text
    assert "peer: c4 24 x 1-1-8, vocabulary tp1" in text
    assert "optimal" in text


def test_without_a_recorded_answer_its_figures_are_null(peer, case_file, capsys):
    path = case_file("s02")
    profiles = str(peer / "profiles")
    assert main([str(path), "--profiles", profiles, "--format", "json"]) == 0
    own = json.loads(capsys.readouterr().out)["cases"][0]
    assert own["peer_iteration_s"] is own["peer_cpu_s"] is own["peer_plan"] is None
    assert own["found"] is True


def test_what_the_rules_do_not_price_is_noted(peer, case_file, capsys):
    def odd(data):
        data["search"] |= {"global_bsz": 15, "settle_chunk": 1, "no_such_option": 1}

        data["cluster"] |= {"num_nodes": 3, "gpus_per_node": 4}

    path = case_file("s02", odd)
    main([str(path), "--profiles", str(peer / "profiles")])
    text = capsys.readouterr().out
    assert "search.no_such_option is not known and left out" in text
    assert "a group of 12 was not measured" in text
    assert "does not divide 15 samples" in text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data["search"].update(global_bsz=0), "search.global_bsz: 0"),
        (lambda data: data["search"].update(pipeline_type="zb"), "expected one of gpipe, pipe"),
        (lambda data: data["model"].pop("hidden_size"), "model.hidden_size: None"),
        (lambda data: data["model"].update(layer_types=3), "a list of kinds of layers"),
        (lambda data: data.update(engine="v3"), "expected one of main, v2.4.0"),
        (lambda data: data.update(memory_constraint_gb="24"), "expected a number above 0"),
        (lambda data: data["profiles"].pop("memory"), "profiles.memory: None"),
    ],
)
def test_a_wrong_case_is_refused_with_its_key(case_file, change, told):
    with pytest.raises(InputError, match="json") as caught:
        read_case(case_file("s02", change))
    assert told in str(caught.value)


def test_a_profile_that_is_not_there_is_told_and_the_exit_code_is_2(case_file, capsys, tmp_path):
    assert main([str(case_file("s02")), "--profiles", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_peer_that_is_faster_gives_exit_code_1():
    same = {"found": True, "ours_under_peer_costs_s": 1.0, "peer_under_peer_costs_s": 1.0}
    assert not slower(same)
    assert slower({**same, "peer_under_peer_costs_s": 0.99})
    assert slower({**same, "found": False})
    assert not slower({**same, "peer_under_peer_costs_s": None})
