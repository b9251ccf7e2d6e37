from __future__ import annotations

import json

import pytest

ARGUMENTS = (
    "--num-layers 12 --hidden-size 640 --num-attention-heads 10 --seq-length 512 "
    "--max-position-embeddings 1024 --vocab-size 50257 --bf16 --micro-batch-size 1 "
    "--global-batch-size 16"
)


@pytest.fixture
def plan_file(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    assert parplan("plan", *small, "--launcher", "megatron", "-o", path).exit_code == 0
    return path


def test_export_writes_files_and_says_how_to_start_them(parplan, plan_file, tmp_path):
    result = parplan("export", plan_file, "--to", "megatron", "-o", tmp_path / "job")
    assert result.exit_code == 0
    names = sorted(path.name for path in (tmp_path / "job").iterdir())
    assert names == ["job.sbatch", "launch.sh", "megatron_args.sh"]
    assert "sbatch" in result.stdout


def test_export_prints_the_same_files(parplan, plan_file, tmp_path):
    parplan("export", plan_file, "--to", "megatron", "-o", tmp_path / "job")
    printed = parplan("export", plan_file, "--to", "megatron").stdout
    for path in (tmp_path / "job").iterdir():
        assert path.read_text() in printed


def test_files_in_the_way_are_kept_unless_forced(parplan, plan_file, tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    (job / "launch.sh").write_text("mine")
    result = parplan("export", plan_file, "--to", "megatron", "-o", job)
    assert result.exit_code == 2
    assert "has launch.sh already" in result.stderr
    assert [path.name for path in job.iterdir()] == ["launch.sh"]
    assert parplan("export", plan_file, "--to", "megatron", "-o", job, "--force").exit_code == 0
    assert (job / "launch.sh").read_text() != "mine"


@pytest.mark.parametrize(
    ("place", "words"), [("a/b/job", "there is no folder"), ("plan.yaml", "is a file")]
)
def test_a_folder_that_cannot_be_written_is_told(parplan, plan_file, tmp_path, place, words):
    result = parplan("export", plan_file, "--to", "megatron", "-o", tmp_path / place)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_plan_that_cannot_be_expressed_is_no(parplan, small, tmp_path):
    path = tmp_path / "plan.yaml"
    parplan("plan", *small, "--fix", "zero=1", "-o", path)
    result = parplan("export", path, "--to", "torchtitan", "-o", tmp_path / "job")
    assert result.exit_code == 1
    assert "torchtitan cannot express this plan" in result.stderr
    assert "nearest plan that it can" in result.stderr
    assert not (tmp_path / "job").exists()


def test_unknown_launchers_and_versions_are_told_with_the_nearest(parplan, plan_file):
    result = parplan("export", plan_file, "--to", "megatorn")
    assert result.exit_code == 2
    assert "did you mean megatron" in result.stderr
    result = parplan("export", plan_file, "--to", "torchtitan", "--launcher-version", "0.3")
    assert result.exit_code == 2
    assert "0.3.0" in result.stderr
    assert parplan("import", ARGUMENTS, "--from", "trace", "--cluster", "8xh100").exit_code == 2
    assert parplan("check", ARGUMENTS, "--launcher", "slurm").exit_code == 2


def test_what_is_imported_can_be_estimated(parplan, tmp_path):
    path = tmp_path / "today.yaml"
    result = parplan("import", ARGUMENTS, "--from", "megatron", "--cluster", "4xh100", "-o", path)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "today.model.yaml").exists()
    estimated = json.loads(parplan("estimate", path, "--format", "json").stdout)
    assert estimated["layout"]["dp"] == 4
    assert parplan("explain", path).exit_code == 0


def test_a_model_of_the_catalogue_is_recognised_and_printed_by_name(parplan):
    big = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 "
        "--max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm "
        "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 "
        "--attention-dropout 0 --hidden-dropout 0 --bf16 --micro-batch-size 1 "
        "--global-batch-size 128 --use-distributed-optimizer"
    )
    result = parplan("import", big, "--from", "megatron", "--cluster", "8xh100")
    assert result.exit_code == 0, result.stderr
    assert "ref: llama3-8b" in result.stdout


def test_import_without_a_file_for_the_model_says_so(parplan):
    result = parplan("import", ARGUMENTS, "--from", "megatron", "--cluster", "4xh100")
    assert result.exit_code == 2
    assert "-o FILE writes both" in result.stderr


def test_import_needs_a_cluster(parplan):
    result = parplan("import", ARGUMENTS, "--from", "megatron")
    assert result.exit_code == 2
    assert "--cluster: is missing" in result.stderr


def test_check_is_no_where_something_would_fail(parplan):
    good = parplan("check", "--launcher", "megatron", "--num-gpus", "8", ARGUMENTS)
    assert good.exit_code == 0
    assert "no rule is broken" in good.stdout
    wrong = f"{ARGUMENTS} --global-batch-size 20"
    bad = parplan("check", "--launcher", "megatron", "--num-gpus", "8", wrong)
    assert bad.exit_code == 1
    assert "legal: 16 or 24" in bad.stdout
    trap = f"{ARGUMENTS} --sequence-parallel"
    assert parplan("check", "--launcher", "megatron", "--num-gpus", "8", trap).exit_code == 0
    answer = json.loads(
        parplan(
            "check", "--launcher", "megatron", "--num-gpus", "8", wrong, "--format", "json"
        ).stdout
    )
    assert answer["fails"] is True
    assert answer["findings"][0]["rule"] == "batch-divides"


def test_check_asks_for_the_number_of_gpus(parplan):
    result = parplan("check", "--launcher", "megatron", ARGUMENTS)
    assert result.exit_code == 2
    assert "--num-gpus" in result.stderr


def test_set_wants_a_name_and_a_value(parplan):
    result = parplan("check", "--launcher", "megatron", "--num-gpus", "8", ARGUMENTS, "--set", "A")
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr


def test_exporting_and_importing_load_neither_torch_nor_numpy(process, plan_file, tmp_path):
    code = (
        "import sys, cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code in (0, None)\n"
        "print('loaded', {'torch', 'numpy', 'networkx'} & sys.modules.keys())"
    )
    job = tmp_path / "job"
    done = process("-c", code, "export", str(plan_file), "--to", "megatron", "-o", str(job))
    assert "loaded set()" in done.stdout, done.stderr
    script = str(job / "launch.sh")
    own = ["--cluster", "4xh100-80g", "-o", str(tmp_path / "again.yaml")]
    done = process("-c", code, "import", script, "--from", "megatron", *own)
    assert "loaded set()" in done.stdout, done.stderr
