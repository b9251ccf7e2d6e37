"""A run that is cut off goes on as if it had not been, under any layout."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from cases import MODELS, SEQ, STEPS, Case
from interrupted import KILLED, killed, losses_of, session, uninterrupted
from matrix import VEE, of_two
from ranks import kill_ranks, run_ranks, start_ranks

from executor import checkpointfiles, checkpointwriter
from executor.checkpointfiles import Manifest, Shelf
from profiles.errors import InputError
from profiles.training import Optimizer

PAIR = Case(name="pair", dp=2, zero=3, micro_batch=2)
CHAINS = {
    "a tied matrix": (Optimizer.ADAMW, (
        Case(name="one", model="qwen"),
        Case(name="V", **VEE, model="qwen", micro_batch=2),  # both copies of the matrix on a rank
        Case(name="split", tp=2, dp=2, zero=3, sequence=True, model="qwen", micro_batch=2),
        Case(name="stages", pp=4, model="qwen", micro_batch=2),  # one on the first, one on the last
        Case(name="pairs", dp=4, zero=2, shard_group=2, model="qwen"),
    )),
    "uneven shards": (Optimizer.SGD, (
        Case(name="uneven", dp=4, zero=3, model="olmo"),
        Case(name="split", tp=2, model="olmo", micro_batch=4),
        Case(name="chunks", pp=2, dp=2, zero=1, chunks=2, schedule="interleaved-1f1b",
             model="olmo"),
        Case(name="replicas", dp=2, model="olmo"),
        Case(name="one", model="olmo"),
    )),
    "learned positions": (Optimizer.ADAM, (
        Case(name="uneven cut", pp=2, schedule="gpipe", cut=(3, 1), model="gpt"),
        Case(name="shards", dp=2, zero=1, model="gpt"),
        Case(name="ZBV", **VEE, dp=2, zero=1, model="gpt"),
        Case(name="split", tp=2, sequence=True, model="gpt", micro_batch=8),
        Case(name="stages", pp=2, tp=2, model="gpt"),
    )),
    "experts": (Optimizer.ADAMW, (
        Case(name="one", model="mixtral"),
        Case(name="EP = DP", dp=4, ep=4, model="mixtral"),
        Case(name="split", tp=2, dp=2, ep=2, expert_tp=2, zero=1, sequence=True, micro_batch=4,
             model="mixtral"),
        Case(name="CP, ZeRO-3", cp=2, ep=2, zero=3, micro_batch=4, model="mixtral"),
        Case(name="mixed", tp=2, micro_batch=4, sequence=True, model="mixtral",
             layers=of_two("tp 2", "zero 3", "tp 2", "zero 2", "zero 3, full", "tp 2")),
    )),
}  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_that_moves_at_every_step_is_that_of_one_process(chain, tmp_path):
    optimizer, cases = CHAINS[chain]
    alone = Case(name="alone", model=cases[0].model, micro_batch=8)
    whole = losses_of(alone, tmp_path / "alone", until=STEPS, optimizer=optimizer)
    moved = []
    for step, case in enumerate(cases):
        moved += losses_of(case, tmp_path / "moved", until=step + 1, optimizer=optimizer)
    assert moved == pytest.approx(whole, rel=1e-5)
    assert len(set(whole)) == STEPS


def test_saving_changes_no_loss(tmp_path):
    plain = losses_of(PAIR, tmp_path / "plain", until=STEPS)
    assert losses_of(PAIR, tmp_path / "saved", until=STEPS, every=1) == plain
    first = losses_of(PAIR, tmp_path / "cut", until=3)
    assert first + losses_of(PAIR, tmp_path / "cut", until=STEPS) == plain


def test_each_rank_writes_what_it_has_and_nothing_twice(tmp_path):
    for name, case in {"shards": PAIR, "replicas": Case(name="", dp=2, tp=2)}.items():
        losses_of(case, tmp_path / name, until=1)
        files = Shelf(tmp_path / name).manifest(1).files
        own = [files[each].size for each in files if each.endswith(".distcp")]
        values = 3 * 4 * case.spec.params_total  # fp32 and two of Adam's states
        overhead = 2_000 * 3 * 60 * len(own)  # torch's header of each shard of each of 60 tensors
        assert len(own) == case.layout.mesh.num_ranks
        assert values < sum(own) < values + overhead
        assert max(own) < 1.2 * sum(own) / len(own)


def test_the_last_ones_stay(tmp_path):
    losses_of(PAIR, tmp_path, until=STEPS, every=1, keep=3)
    assert Shelf(tmp_path).steps == [5, 4, 3]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"step-{step:08d}" for step in (3, 4, 5)
    }  # fmt: skip


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_behind(real, limit):
    """``real``, until so many bytes or calls have been its own."""
    spent = []

    def call(*arguments):
        spent.append(len(arguments[1]) if len(arguments) > 1 else 1)
        return die() if sum(spent) > limit else real(*arguments)

    return call


def arm(where):
    """Let this rank be killed there."""
    if where == "shard":
        own = checkpointwriter.DigestedFile
        own.write = dies_behind(own.write, 20_000)
    elif where == "older ones":
        checkpointfiles.shutil.rmtree = die
    else:
        own, calls = checkpointfiles, {"before it is whole": 0, "when it is whole": 1}
        own.sync_folder = dies_behind(own.sync_folder, calls[where])


def killed_at(where, folder):
    """Ranks that save step 1, then 2, where one of them is killed."""
    victim = int(where == "shard")

    def rank(own):
        def before(checkpoints):
            if own == victim and checkpoints.trainer.done == 1:
                checkpoints.wait()
                arm(where)

        return session(PAIR, folder, until=2, every=1, keep=1, before=before)

    children = start_ranks(2, rank)
    os.waitid(os.P_PID, list(children.values())[victim], os.WEXITED | os.WNOWAIT)
    kill_ranks(children)


@pytest.mark.parametrize(
    ("where", "taken_up"),
    [("shard", 1), ("before it is whole", 1), ("when it is whole", 2), ("older ones", 2)],
)
def test_a_rank_that_is_killed_in_a_save_costs_that_save_at_most(where, taken_up, tmp_path):
    plain = losses_of(PAIR, tmp_path / "plain", until=4)
    killed_at(where, tmp_path / "killed")
    assert Shelf(tmp_path / "killed").steps[0] == taken_up
    assert losses_of(PAIR, tmp_path / "killed", until=4) == plain[taken_up:]
    assert Shelf(tmp_path / "killed").steps[0] == 4
    assert not list((tmp_path / "killed").glob("*.part"))


def test_twenty_kills_at_random_moments_lose_no_checkpoint(tmp_path):
    found = killed(tmp_path, kills=20, seed=0)
    reference = uninterrupted(tmp_path / "none", max(step for step, _ in found.losses) + 1)
    assert found.kills == 20
    assert found.repeated <= 2  # the step that is being saved, and the one that is being done
    assert max(found.taken_up) > 0
    assert all(loss == pytest.approx(reference[step], rel=1e-6) for step, loss in found.losses)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_costs_that_checkpoint_only(rank, tmp_path):
    """A file-size limit of the kernel, on one rank, while steps 2 and 3 are saved."""

    def limited(own):
        def before(checkpoints):
            done = checkpoints.trainer.done
            if own == rank and done in (1, 3):
                checkpoints.wait()
                limit = 30_000 if done == 1 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        return session(PAIR, tmp_path / "full", until=4, every=1, before=before)

    plain = losses_of(PAIR, tmp_path / "plain", until=4)
    losses, told = run_ranks(2, limited)[0]
    assert losses == plain
    assert told == [
        f"checkpoint of step {step} not written: rank {rank}: File too large; the last one is "
        "that of step 1"
        for step in (2, 3)
    ]
    assert Shelf(tmp_path / "full").steps == [4, 1]
    assert len(list((tmp_path / "full").iterdir())) == 2


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "a bit of a shard": (lambda f: flip(f / "__1_0.distcp", 5_000), "__1_0.distcp is not what"),
    "a bit of the metadata": (lambda f: flip(f / ".metadata", 99), ".metadata is not what was"),
    "a bit of the manifest": (lambda f: flip(f / "checkpoint.json", 90), "checkpoint.json is n"),
    "the end of a shard": (lambda f: cut(f / "__0_0.distcp"), "bytes instead of"),
    "a shard": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "the manifest": (lambda f: (f / "checkpoint.json").unlink(), "checkpoint.json is missing"),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Checkpoints of steps 1 and 2, and the losses of all steps."""
    place = tmp_path_factory.mktemp("two")
    losses = losses_of(PAIR, place / "plain", until=4)
    losses_of(PAIR, place / "run", until=2, every=1)
    return place / "run", losses


@pytest.mark.parametrize("lost", DAMAGES)
def test_what_a_disk_loses_is_told_and_the_checkpoint_before_taken(lost, two, tmp_path):
    folder = shutil.copytree(two[0], tmp_path / "run")
    damage, words = DAMAGES[lost]
    damage(folder / "step-00000002")
    losses, told = run_ranks(2, lambda _: session(PAIR, folder, until=4))[0]
    assert losses == two[1][1:]
    (line,) = told
    assert line.startswith("checkpoint of step 2 is damaged: ")
    assert words in line
    assert f"going on from step 1, the damaged one is now {folder}/step-00000002.damaged" in line
    assert Shelf(folder).steps == [4, 1]
    assert (folder / "step-00000002.damaged").is_dir()


def refusal(folder, case=PAIR, **how):
    """The ``InputError`` of a start, which all ranks have; nothing changes on disk."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    def rank(_):
        try:
            session(case, folder, until=4, **how)
        except InputError as error:
            return str(error)

    texts = set(run_ranks(case.layout.mesh.num_ranks, rank))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (text,) = texts
    return text


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew(two, tmp_path):
    folder = shutil.copytree(two[0], tmp_path / "run")
    for step in (1, 2):
        cut(folder / f"step-{step:08d}" / "__0_0.distcp")
    told = refusal(folder).splitlines()
    assert len(told) == 2
    assert all("bytes instead of" in line and "another --out begins anew" in line for line in told)


def test_a_newer_version_is_refused(two, tmp_path):
    folder = shutil.copytree(two[0], tmp_path / "run")
    path = folder / "step-00000002" / "checkpoint.json"
    own = checkpointfiles.json.loads(path.read_text())
    del own["sha256"]
    own["format"] = 2
    own["sha256"] = checkpointfiles.digest_of(own)
    path.write_text(checkpointfiles.json.dumps(own))
    assert "written by a newer parplan: format 2, this one reads 1 (update" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "x"), ("optimizer", "sgd"), ("global_batch", 16), ("seed", 1), ("data", "x")],
)
def test_a_checkpoint_of_another_run_is_refused(name, value, two):
    was = {"model": "small", "optimizer": "", "global_batch": 8, "seq_len": SEQ, "seed": 0,
           "data": ""}  # fmt: skip
    text = refusal(two[0], run=was | {name: value})
    assert f"a checkpoint with {name.replace('_', ' ')} {was[name]}, not {value} (" in text
    assert "another --out, which begins anew" in text


def test_a_checkpoint_without_what_the_plan_needs_is_refused(two):
    text = refusal(two[0], optimizer=Optimizer.SGD)
    assert "as nothing, the plan as (" in text
    assert "momentum_buffer" in text
    other = Case(name="", dp=2, zero=3, model="gpt")
    assert MODELS["gpt"] != MODELS["llama"]
    assert ": has model.layers." in refusal(two[0], case=other)


def test_a_manifest_reads_as_it_was_written(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.part(7).mkdir(parents=True)
    own = Manifest(step=7, run={"seed": 3}, files={})
    shelf.complete(own, keep=1)
    assert shelf.manifest(7) == shelf.latest() == own
    assert Path(tmp_path / "step-00000007").is_dir()
    assert KILLED.layout.mesh.num_ranks == 2
