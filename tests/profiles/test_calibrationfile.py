from __future__ import annotations

import pytest

from profiles import load_calibration, load_cluster, shelf
from profiles.calibrations import calibration_named
from profiles.units import GIB, MIB

CLUSTER = load_cluster("2x8xh100")
DATASHEET = (shelf.DATA / "calibrations" / "datasheet.yaml").read_text(encoding="utf-8")
INTERVAL = "step_time_90: [0.79, 2.2]"
SEEN = "seen: {params_billion: [70, 7], seq_len: [8192, 2048]}\nefficiencies:"


def load(path):
    return load_calibration(None, CLUSTER, path)


def test_the_datasheet_calibration_is_in_seconds_and_bytes():
    calibration, _ = load_calibration(None, CLUSTER)
    assert calibration.name == "datasheet"
    assert calibration.efficiencies.kernel_launch_s == pytest.approx(15e-6)
    assert calibration.efficiencies.context_bytes == round(1.2 * GIB)
    assert calibration.efficiencies.communicator_bytes == 200 * MIB
    assert calibration.efficiencies.attention["flash3"].forward == 0.70


def test_a_stack_is_found_however_it_is_capitalised():
    calibration, note = load_calibration("megatron-lm", load_cluster("8xa100-80g"))
    assert calibration.name == "a100-80g-megatron-lm"
    assert note is None


def test_an_unknown_stack_falls_back_to_others_of_its_device_with_a_wider_interval():
    calibration, note = load_calibration("no-such-stack", CLUSTER)
    assert calibration.device == "h100-80g"
    assert calibration.stack == "any"
    assert note is not None
    assert note.startswith("no calibration of no-such-stack on h100-80g: that of other stacks on")
    narrow = calibration_named("h100-80g-nemo-megatron-core").efficiencies.step_time_90
    wide = calibration.efficiencies.step_time_90
    assert wide[0] < narrow[0] < 1 < narrow[1] < wide[1]


def test_a_release_that_is_not_known_falls_back_to_its_family():
    calibration, note = load_calibration("NeMo/Megatron-Core 99.1", CLUSTER)
    assert calibration.stack.startswith("NeMo/Megatron-Core")
    assert note is not None


def test_without_a_stack_the_datasheet_is_used_and_the_note_lists_those_of_the_device():
    calibration, note = load_calibration(None, CLUSTER)
    assert calibration.name == "datasheet"
    assert note is not None
    assert "NeMo" in note


def test_a_file_of_the_users_is_taken_and_a_wrong_device_noted(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(DATASHEET)
    assert load(path)[1] is None
    path.write_text(DATASHEET.replace("device: any", "device: a100-80g"))
    assert load(path)[1] == "datasheet was made on a100-80g, not on h100-80g"


@pytest.mark.parametrize("name", shelf.names("calibrations"))
def test_every_calibration_of_the_catalogue_is_valid(name):
    load(shelf.DATA / "calibrations" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("gemm: 0.92", "gemm: 86", "efficiencies.gemm is '86'; expected at most 1"),
        ("gemm: 0.92", "gemm: 0", "efficiencies.gemm is '0'; expected more than 0"),
        ("gemm: 0.92", "gemm: true", "efficiencies.gemm is 'true'; expected a number"),
        ("gemm: 0.92", "gem: 0.86", "efficiencies.gemm is missing; expected large GEMMs, part"),
        ("  flash2:", "  flash4:", "efficiencies.attention.flash2 is missing"),
        ("memory_sigma: 0.08", "memory_sigma: 0", "efficiencies.memory_sigma is '0'; expected mo"),
        ("moe_imbalance: 1.15", "moe_imbalance: .5", "efficiencies.moe_imbalance is '.5'; expe"),
        (INTERVAL, "step_time_90: [1.2, 0.9]", "step_time_90 is a list; expected the lesser"),
        (INTERVAL, "step_time_90: [0.9]", "step_time_90 is a list; expected a list with at l"),
        ("efficiencies:", SEEN, "seen.params_billion is a list; expected the lesser of both first"),
        ("efficiencies:", SEEN, "seen.seq_len is a list; expected the lesser of both first"),
        ("knowledge: datasheet", "knowledge: guess", "knowledge is 'guess'; expected datasheet, "),
    ],
)
def test_a_wrong_efficiency_is_told(problems, old, new, told):
    assert old in DATASHEET
    lines = problems(load, DATASHEET.replace(old, new))
    assert any(told in line for line in lines)
