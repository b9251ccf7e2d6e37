from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from profiles import import_profile, yamlfile
from profiles.errors import InputError
from profiles.galvatron import read_galvatron
from profiles.measured import ENDS, Operation, Position
from profiles.measuredfile import profile_of, profile_text
from profiles.units import MIB

FILES = {
    "computation.json": {
        "layernum[2]_bsz8_seq512": 9.5,
        "layertype_0_bsz8_seq512": 0.5,
        "layertype_1_bsz8_seq512": 0.25,
        "layertype_other_bsz8_seq[512,512]": 2,
    },
    "memory.json": {
        "1_1_8_vtp_sp": {"layernum[1]_bsz8_seq512_rank0_ms": 1, "layernum[1]_rank0_act": 2},
        "layertype_0_sp": {
            "512": {
                "parameter_size": 96.5,
                "tp_activation_per_bsz_dict": {"1": 50, "2": 26.25, "checkpoint": 4},
            }
        },
        "layertype_1": {
            "512": {"parameter_size": 10, "tp_activation_per_bsz_dict": {"1": 5}},
        },
        "other_memory_pp_off_sp": {
            "[512,512]": {"model_states": {"1": 800}, "activation": {"1": 100, "2": 60}}
        },
    },
    "allreduce.json": {"allreduce_size_8_consec_1": 150.5, "allreduce_size_4_consec_0": 20},
    "p2p.json": {"pp_size_2": 160},
    "sp_time.json": {"allreduce_size_8_1MB_time": 0.08, "all2all_size_4_16MB_time": 0.2},
    "overlap.json": {"overlap_coe": 1.125},
}


@pytest.fixture
def folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).write_text(json.dumps(data, indent=1))
    return tmp_path


def test_every_kind_of_file_is_read_in_seconds_and_bytes(folder):
    profile, _ = read_galvatron([folder], "mine", "test")
    first, second, ends = profile.layer_times
    assert (first.model, first.layer, first.batch) == ("computation", "block-0", 8)
    assert first.forward_s == pytest.approx(8 * 0.5e-3)
    assert second.layer == "block-1"
    assert (ends.layer, ends.seq_len) == (ENDS, (512, 512))
    split, plain = profile.layer_memory
    assert split.parameter_bytes == 96.5 * MIB
    assert split.activation_bytes == {1: 50 * MIB, 2: 26.25 * MIB}
    assert split.recomputed_bytes == 4 * MIB
    assert (split.sequence_parallel, plain.sequence_parallel) == (True, False)
    assert plain.recomputed_bytes is None
    (other,) = profile.ends_memory
    assert (other.position, other.state_bytes) == (Position.ONLY, {1: 800 * MIB})
    near, apart, p2p = profile.bandwidths
    assert (near.group, near.neighbours, near.bytes_per_s) == (8, True, 150.5e9)
    assert apart.neighbours is False
    assert (p2p.operation, p2p.neighbours) == (Operation.P2P, None)
    reduce, exchange = profile.collective_times
    assert (reduce.operation, reduce.num_bytes) == (Operation.ALL_REDUCE, MIB)
    assert reduce.seconds == pytest.approx(80e-6)
    assert exchange.operation is Operation.ALL_TO_ALL
    assert profile.overlaps[0].slowdown == 1.125


def test_rows_of_whole_runs_and_unknown_keys_are_noted(folder):
    (folder / "overlap.json").write_text('{"overlap_coe": 1.1, "layer_0_time": 3}')
    _, notes = read_galvatron([folder], "mine", "test")
    told = [note.replace(f"{folder}/", "") for note in notes]
    assert "overlap.json: unknown keys left out: layer_0_time" in told
    assert any(note.startswith("memory.json: 2 rows of whole runs left out") for note in told)
    assert any(note.startswith("computation.json: 1 rows") for note in told)


def test_a_profile_is_the_same_after_writing_and_reading(folder):
    profile, _ = read_galvatron([folder], "mine", "test")
    again = profile_of(yamlfile.parse(profile_text(profile), "file"))
    assert again.name == "mine"
    assert again.layer_memory == profile.layer_memory
    assert again.ends_memory == profile.ends_memory
    assert again.bandwidths == profile.bandwidths
    assert again.overlaps == profile.overlaps
    for ours, theirs in zip(again.layer_times, profile.layer_times, strict=True):
        assert ours.forward_s == pytest.approx(theirs.forward_s, rel=1e-15)
    for ours, theirs in zip(again.collective_times, profile.collective_times, strict=True):
        assert (ours.group, ours.num_bytes) == (theirs.group, theirs.num_bytes)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"layertype_0_bsz8_seq512": -1}', "file.json:1:29: layertype_0_bsz8_seq512 is '-1'"),
        ('{"layertype_0_bsz8_seq512": true}', "is 'true'; expected a number from 0"),
        ('{"layertype_0_bsz0_seq512": 1}', "file.json:1:2: a batch of 0 samples"),
        ('{"layertype_0_bsz8_seqx": 1}', "file.json:1:2: the sequence length 'x'"),
        ('{"layertype_0_sp": 3}', "file.json:1:20: layertype_0_sp is no object"),
        ('{"layertype_0_sp": {"512": {"parameter_size": 1}}}', "_per_bsz_dict is missing"),
        (
            (
                '{"layertype_0": {"512": {"parameter_size": 1,\n'
                ' "tp_activation_per_bsz_dict": {"two": 1}}}}'
            ),
            "file.json:2:33: the degree 'two'",
        ),
        ('{"other_memory_pp_off": {"512": {"activation": {"1": 1}}}}', "model_states is missing"),
        ('{"allreduce_size_8_consec_1": 0}', "file.json:1:31: allreduce_size_8_consec_1 is '0'"),
        ('{"overlap_coe": 0.5}', "expected a number from 1"),
        ('{"something": 1}', "no key of this file is known"),
        ('{"overlap_coe": 1,', "file.json:1:19: not valid JSON"),
        ('{"overlap_coe": 1, "overlap_coe": 2}', "stands twice"),
        ('{"overlap_coe": NaN}', "NaN is not a number of JSON"),
        ("[]", "the file holds a list"),
        ("", "the file is empty"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_damage_is_told_with_its_place(problems, text, told):
    lines = problems(lambda path: read_galvatron([Path(path)], "x", "y"), text, "file.json")
    assert any(told in line for line in lines), lines


def test_the_damage_of_every_file_is_told_at_once(folder):
    (folder / "overlap.json").write_text('{"overlap_coe": "x"}')
    (folder / "p2p.json").write_text('{"pp_size_2": -1, "pp_size_4": 0}')
    with pytest.raises(InputError) as caught:
        import_profile("galvatron", [folder])
    assert len(caught.value.problems) == 3


def test_the_command_writes_a_profile_that_says_where_it_is_from(parplan, folder, tmp_path):
    path = tmp_path / "profile.yaml"
    done = parplan("profile", "import", "--from", "galvatron", folder, "-o", path)
    assert done.exit_code == 0
    assert f"written: {path}" in done.stderr
    written = yaml.safe_load(path.read_text())
    assert (written["schema_version"], written["kind"]) == (1, "profile")
    assert written["source"] == f"Hetu-Galvatron: {folder.name}"
    assert parplan("profile", "import", "--from", "galvatron", folder).stdout == path.read_text()
    assert parplan("profile", "import", "--from", "galvatron", folder, "-o", path).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["import", "--from", "galvatron", "no-such-folder"], "cannot be read"),
        (["import", "--from", "galvatorn", "."], "galvatron"),
        (["import", "--from", "galvatron"], "PATH"),
        (["imprt"], "did you mean import?"),
    ],
)
def test_a_wrong_command_is_refused(parplan, arguments, told):
    done = parplan("profile", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in done.stderr


def test_a_folder_without_json_is_refused(parplan, tmp_path):
    done = parplan("profile", "import", "--from", "galvatron", tmp_path)
    assert done.exit_code == 2
    assert "the folder has no *.json" in done.stderr


def test_a_profile_file_is_checked_with_places(problems):
    head = "schema_version: 1\nkind: profile\nname: x\nsource: y\n"
    text = head + "overlaps:\n- {cluster: a, slowdon: 1}\n"
    lines = problems(lambda path: profile_of(yamlfile.read(path)), text)
    assert any(line.startswith("file.yaml:6:16: unknown key overlaps[0].slowdon") for line in lines)


def test_the_published_profiles_are_read_whole(peer):
    text, notes = import_profile("galvatron", [peer / "profiles"])
    profile = profile_of(yamlfile.parse(text, "profile"))
    assert len(profile.layer_times) == 110
    assert len(profile.layer_memory) == 21
    assert len(profile.ends_memory) == 48
    assert len(profile.bandwidths) == 63
    assert len(profile.collective_times) == 198
    assert not [note for note in notes if "unknown" in note]
