from __future__ import annotations

import pytest

from profiles import load_training
from profiles.errors import InputError
from profiles.training import Optimizer, Precision, TrainingSpec

GOOD = "schema_version: 1\nkind: training\nglobal_batch: 512\nseq_len: 4096\n"


def told_of(problems, text):
    return problems(load_training, text)


def test_a_file_with_only_the_sizes_takes_the_defaults(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(GOOD)
    assert load_training(path) == TrainingSpec(global_batch=512, seq_len=4096)


def test_flags_override_the_file_and_none_does_not(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(GOOD)
    flags = {"optimizer": "lion", "precision": Precision.FP16, "seq_len": None}
    training = load_training(path, flags)
    assert (training.optimizer, training.precision, training.seq_len) == (
        Optimizer.LION,
        Precision.FP16,
        4096,
    )


def test_a_wrong_flag_is_told_as_the_flag_and_not_as_the_file(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(GOOD)
    with pytest.raises(InputError) as caught:
        load_training(path, {"seq_len": 0, "grad_dtype": "fp23"})
    assert [str(problem) for problem in caught.value.problems] == [
        "--seq-len: seq_len is '0'; expected at least 1",
        "--grad-dtype: grad_dtype is 'fp23'; expected fp32, bf16 or fp16 (did you mean fp32?)",
    ]


def test_without_a_file_the_missing_sizes_are_asked_for_as_flags():
    with pytest.raises(InputError) as caught:
        load_training(None)
    assert [problem.where for problem in caught.value.problems] == ["--global-batch", "--seq-len"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "micro_batch: 1e9",
            (
                "file.yaml:5:14: micro_batch is '1e9'; expected a whole number "
                "(YAML reads 1e9 as text: write 1.0e+9 or 1000000000)"
            ),
        ),
        (
            "micro_batch: on",
            (
                "file.yaml:5:14: micro_batch is 'on'; expected a whole number "
                "(YAML reads on as true: quote it)"
            ),
        ),
        ("micro_batch: 2.0", "file.yaml:5:14: micro_batch is '2.0'; expected a whole number"),
        ("micro_batch: 0", "file.yaml:5:14: micro_batch is '0'; expected at least 1"),
        ("micro_batch: -4", "file.yaml:5:14: micro_batch is '-4'; expected at least 1"),
        (
            "micro_batch: 1" + "0" * 30,
            "file.yaml:5:14: micro_batch is '1" + "0" * 30 + "'; expected at most 1,000,000",
        ),
        (
            "micro_batch: '8'",
            "file.yaml:5:14: micro_batch is '8'; expected a whole number (without quotes)",
        ),
        (
            "micro_batch: 010",
            (
                "file.yaml:5:14: micro_batch is '010'; expected a whole number "
                "(a decimal number without leading zeros)"
            ),
        ),
        (
            'micro_batch: "1,024"',
            "file.yaml:5:14: micro_batch is '1,024'; expected a whole number (digits only: 1024)",
        ),
        ("micro_batch: [1]", "file.yaml:5:14: micro_batch is a list; expected a whole number"),
        (
            "fused_kernels: 1",
            "file.yaml:5:16: fused_kernels is '1'; expected true or false",
        ),
        (
            "precision: yes",
            (
                "file.yaml:5:12: precision is 'yes'; expected bf16, fp16, fp32, fp8-tensorwise, "
                "fp8-blockwise or nvfp4 (YAML reads yes as true: quote it)"
            ),
        ),
        (
            "optimizer: adamv",
            (
                "file.yaml:5:12: optimizer is 'adamv'; "
                "expected adamw, adam, sgd, lion, adamw-8bit or adamw-bf16 "
                "(did you mean adam or adamw?)"
            ),
        ),
        (
            "sequence_len: 8",
            (
                "file.yaml:5:1: unknown key sequence_len; expected one of attention, "
                "fused_kernels, global_batch, grad_dtype, kind, micro_batch, optimizer, precision, "
                "schema_version, seq_len (did you mean seq_len?)"
            ),
        ),
        (
            "micro_batch: 3",
            (
                "file.yaml:5:14: micro_batch 3 with global_batch 512; "
                "expected a micro_batch that divides global_batch"
            ),
        ),
    ],
)
def test_a_wrong_line_is_told_with_its_place_and_its_cure(problems, line, told):
    assert told_of(problems, GOOD + line + "\n") == [told]


def test_fused_kernels_may_be_off(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(GOOD + "fused_kernels: off\n")
    assert not load_training(path).fused_kernels


def test_a_missing_key_is_told_with_what_it_means(problems):
    text = "schema_version: 1\nkind: training\nglobal_batch: 512\nseqlen: 1\n"
    told = told_of(problems, text)
    assert told[0] == (
        "file.yaml:1:1: seq_len is missing; expected tokens a sequence (is it seqlen, misspelt?)"
    )
    assert told[1].startswith("file.yaml:4:1: unknown key seqlen;")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("kind: training", "kind: trainning", "2:7: kind is 'trainning'; expected training"),
        ("kind: training", "kind: cluster", "2:7: kind is 'cluster'; expected training"),
        ("version: 1", "version: 2", "1:17: schema_version is '2'; expected at most 1"),
        ("version: 1", "version: true", "1:17: schema_version is 'true'; expected a whole"),
        ("version: 1", "version: 1.0", "1:17: schema_version is '1.0'; expected a whole"),
        ("schema_version: 1", "{}", "2:1: not valid YAML"),
    ],
)
def test_another_version_or_kind_is_refused(problems, old, new, told):
    assert told_of(problems, GOOD.replace(old, new))[0].startswith(f"file.yaml:{told}")
