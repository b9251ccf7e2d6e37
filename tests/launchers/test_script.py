"""Scripts and arguments as people have them: variables, arrays, conditions, and what is missing."""

from __future__ import annotations

import pytest

from executor.importing import Asked, import_job
from executor.launchers.commandline import Source
from executor.launchers.registry import launcher
from executor.launchers.script import commands_of_text
from profiles.errors import InputError

MODEL = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50257 --bf16"
)
ARGUMENTS = f"{MODEL} --micro-batch-size 1 --global-batch-size 64"


def told(text, tmp_path=None, **how):
    if tmp_path is not None:
        path = tmp_path / "run.sh"
        path.write_text(text)
        text = str(path)
    return launcher("megatron")[0].tell(Source(text, **how), num_gpus=None, version="d98e8a6")


def refusal(text, tmp_path=None, **how):
    with pytest.raises(InputError) as error:
        told(text, tmp_path, **how)
    return str(error.value)


def words(text):
    return [
        [token.text for token in command.tokens]
        for command in commands_of_text(text, {}, where="t")
    ]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("A=1; B=$A; run $B", ["run", "1"]),
        ("A='x y'; run $A", ["run", "x", "y"]),
        ("A='x y'; run \"$A\"", ["run", "x y"]),
        ("A=(a 'b c' # no\n d); run \"${A[@]}\"", ["run", "a", "b c", "d"]),
        ("A=(a); A+=(b); run ${A[@]}", ["run", "a", "b"]),
        ("A=a; A+=b; run $A", ["run", "ab"]),
        ("run ${A:-3} ${B:-$((2*4))}", ["run", "3", "8"]),
        ("N=4; G=8; run $(($N*G-2))", ["run", "30"]),
        ("A=1\nif [ $A -gt 0 ]; then B=x; else B=y; fi\nrun $B", ["run", "x"]),
        (
            "A=7B\nif [[ $A == 13B ]]; then B=1; elif [[ $A == 7B ]]; then B=2; fi\nrun $B",
            ["run", "2"],
        ),
        ("run a \\\n  b # c\n", ["run", "a", "b"]),
        ("cat <<END\nrun x\nEND\nrun y", ["run", "y"]),
        ("cat <<END | run y\nrun x\nEND\n", ["run", "y"]),
        ('E=\nrun $E "$E" a', ["run", "", "a"]),
    ],
)
def test_the_shell_is_followed(text, last):
    assert words(text)[-1] == last


def test_a_script_says_how_many_processes_it_starts(tmp_path):
    start = "torchrun --nnodes $SLURM_NNODES --nproc_per_node $G p.py"
    text = f"#SBATCH --nodes=4\nG=8\n{start} {ARGUMENTS}"
    assert told(text, tmp_path).started == 32
    assert told(f"torchrun --nproc-per-node=8 p.py {ARGUMENTS}", tmp_path).started == 8


def test_a_launch_line_inside_a_text_is_found(tmp_path):
    text = f"export CMD='p.py {ARGUMENTS}'\nsrun bash -c 'torchrun --nproc_per_node 8 $CMD'"
    assert told(text, tmp_path).micro_batch == 1


def test_arguments_may_stand_on_lines_without_backslashes_and_with_bars():
    found = told(f"{MODEL}\n--micro-batch-size 1\n--pipeline-model-parallel-layout Et*12|t*12L")
    assert found.stage_layout == "Et*12|t*12L"


def test_a_variable_that_is_not_set_and_matters_is_named_with_its_place(tmp_path):
    said = refusal(f"torchrun p.py {MODEL} --micro-batch-size $MBS", tmp_path)
    assert "run.sh:1:" in said
    assert "--micro-batch-size needs $MBS, which is not set" in said
    assert "--set MBS=VALUE" in said
    found = told(f"torchrun p.py {MODEL} --micro-batch-size $MBS", tmp_path, values={"MBS": "4"})
    assert found.micro_batch == 4


def test_a_variable_that_does_not_matter_may_be_missing(tmp_path):
    found = told(f"torchrun p.py {ARGUMENTS} --data-path $DATA $MORE", tmp_path)
    assert found.unknown == []
    assert any("$MORE is not set" in note for note in found.notes)


def test_several_launch_lines_are_named_and_one_is_picked(tmp_path):
    text = f"torchrun a.py {ARGUMENTS}\ntorchrun a.py {ARGUMENTS} --tensor-model-parallel-size 2\n"
    said = refusal(text, tmp_path)
    assert "2 launch lines, in lines 1, 2" in said
    assert "--line 1 picks the first" in said
    assert told(text, tmp_path, line=2).tp == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is nothing to read"),
        ("hello world", "no launch line"),
        ("--tensor-model-parallel-size two --micro-batch-size 1", "'two'; expected a whole number"),
        (
            "--tensor-model-parallel-size 0 --micro-batch-size 1",
            "expected a whole number, at least 1",
        ),
        ("--tensor-model-parallel-size --micro-batch-size 1", "has nothing"),
        ("--recompute-granularity ful --micro-batch-size 1", "did you mean full?"),
        ("--cp-comm-type allgather --micro-batch-size 1", "did you mean all_gather?"),
        (
            "--micro-batch-size 1 --global-batch-size 'unterminated",
            "a quote begins here and does not end",
        ),
    ],
)
def test_unreadable_arguments_are_told_with_place_and_cure(text, words):
    said = refusal(text)
    assert words in said
    assert said.startswith("arguments")


def test_every_wrong_value_is_told_at_once():
    said = refusal("--tensor-model-parallel-size x --pipeline-model-parallel-size y")
    assert len(said.splitlines()) == 2


def test_unknown_arguments_are_listed_with_the_nearest_name():
    found = told(f"{ARGUMENTS} --tensor-model-parallell-size 8 --frobnicate 3")
    assert any("did you mean --tensor-model-parallel-size" in each for each in found.unknown)
    assert any("--frobnicate" in each for each in found.unknown)


def test_arguments_with_a_bearing_that_no_estimate_has_are_listed():
    found = told(f"{ARGUMENTS} --optimizer-cpu-offload --window-attn-skip-freq 4")
    assert found.unmodelled == ["--optimizer-cpu-offload", "--window-attn-skip-freq 4"]


def test_what_neither_arguments_nor_flags_say_is_asked_for():
    no_vocabulary = ARGUMENTS.replace("--vocab-size 50257", "")
    with pytest.raises(InputError, match="--vocab-size says it"):
        import_job(no_vocabulary, "megatron", cluster="8xh100")
    found = import_job(no_vocabulary, "megatron", cluster="8xh100", asked=Asked(vocab=50257))
    assert found.inputs.model.num_blocks == 24
    with pytest.raises(InputError, match="was not told the model"):
        import_job("--micro-batch-size 1 --bf16", "megatron", cluster="8xh100")


def test_a_layout_that_breaks_rules_is_refused_with_the_argument_that_does():
    broken = f"{ARGUMENTS} --tensor-model-parallel-size 3"
    with pytest.raises(InputError, match="arguments:1:") as error:
        import_job(broken, "megatron", cluster="6xh100")
    assert "heads do not divide by tp 3" in str(error.value)


@pytest.mark.parametrize(
    "text", ["$(", "'", '"', "${", "A=(", "`", "((", "if", "$((1/0))", "\\", "\x00"]
)
def test_damaged_text_ends_in_a_refusal(text):
    for case in (text, f"A={text}\ntorchrun p.py {ARGUMENTS}", f"{ARGUMENTS} {text}"):
        try:
            told(case)
        except InputError as error:
            assert error.problems  # noqa: PT017 - either is fine


def test_other_files_are_refused_with_place(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "many", "zero_optimization": {"stage": "two"}}')
    with pytest.raises(InputError) as error:
        launcher("deepspeed")[0].tell(Source(str(path)), num_gpus=8, version="0.19.8")
    assert "ds.json:1:22" in str(error.value)
    assert "ds.json:1:61" in str(error.value)
    path.write_text('{"train_batch_size": 8, ')
    with pytest.raises(InputError, match="not valid JSON"):
        launcher("deepspeed")[0].tell(Source(str(path)), num_gpus=8, version="0.19.8")
    with pytest.raises(InputError, match="there is no file"):
        launcher("deepspeed")[0].tell(Source("nowhere.json"), num_gpus=8, version="0.19.8")


def test_a_galvatron_plan_whose_layers_differ_in_tp_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"pp_deg": 1, "tp_sizes_enc": "1,1,2,2", "global_bsz": 8, "chunks": 1}')
    found, _ = launcher("galvatron")
    with pytest.raises(InputError, match="1 in layers 0-1, 2 in layers 2-3"):
        found.hear(found.tell(Source(str(path)), num_gpus=8, version="vocab_sdp"))


@pytest.mark.parametrize("text", ["--flag 'a b", '--flag "a b', 'run --flag "${A:-it}'])
def test_a_quote_without_end_is_refused_with_its_place(text):
    with pytest.raises(InputError, match=r"arguments:1:\d+: a quote begins here"):
        Source(text).commands()


def test_a_path_that_does_not_exist_is_not_taken_for_arguments():
    with pytest.raises(InputError, match=r"there is no file 'jobs/launch\.sh'"):
        Source("jobs/launch.sh").commands()
