"""Which degrees a model and a launcher allow: the rules of divisibility, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from costmodel.layout import ContextComm
from profiles.layers import Block, CustomLayer, ExpertFeedForward

if TYPE_CHECKING:
    from planner.launchers import LauncherRules
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["DegreeRules"]


@dataclass(frozen=True)
class DegreeRules:
    """For each degree, the rule that forbids it, None if it is legal."""

    model: ModelSpec
    training: TrainingSpec
    rules: LauncherRules

    @cached_property
    def _blocks(self) -> list[Block]:
        return [run.layer for run in self.model.runs if isinstance(run.layer, Block)]

    def tp_problem(self, tp: int) -> str | None:
        """The rule that forbids a tensor parallel degree, None if it is legal."""
        if tp == 1:
            return None
        if not self.rules.tensor:
            return f"{self.rules.name} has no tensor parallelism"
        if not self._blocks and not any(isinstance(r.layer, CustomLayer) for r in self.model.runs):
            return "tensor parallelism needs transformer blocks"
        problems = (self._undivided(block, tp) for block in self._blocks)
        return next((problem for problem in problems if problem), None)

    def _undivided(self, block: Block, tp: int) -> str | None:
        """What of a block a tensor parallel degree does not divide."""
        attention, feed_forward = block.attention, block.feed_forward
        if attention.heads % tp:
            return f"{attention.heads} heads do not divide by tp {tp}"
        kv = attention.heads if attention.latent else attention.kv_heads
        if kv % tp and not (self.rules.replicates_kv_heads and tp % kv == 0):
            return f"{kv} key/value heads do not divide by tp {tp} on {self.rules.name}"
        width = (
            feed_forward.shared_hidden
            if isinstance(feed_forward, ExpertFeedForward)
            else feed_forward.ffn_hidden
        )
        return f"feed-forward width {width} does not divide by tp {tp}" if width % tp else None

    def cp_problem(self, cp: int) -> str | None:
        """The rule that forbids a context parallel degree, None if it is legal."""
        if cp == 1:
            return None
        if not self.rules.context:
            return f"{self.rules.name} has no context parallelism"
        if not self._blocks:
            return "context parallelism needs transformer blocks"
        if self.training.seq_len % (2 * cp):
            return f"seq_len {self.training.seq_len} does not divide by 2 x cp {cp}"
        return None

    def cp_comm_problem(self, way: ContextComm) -> str | None:
        """The rule that forbids one way, None if it is legal."""
        windows = [block.attention.window or self.training.seq_len for block in self._blocks]
        if way is ContextComm.RING and min(windows, default=0) < self.training.seq_len:
            return "attention in windows does not go round a ring"
        return None

    def pp_problem(self, pp: int) -> str | None:
        """The rule that forbids a number of stages, None if it is legal."""
        blocks = max(1, self.model.num_blocks)
        if pp == 1:
            return None
        if not self.rules.pipeline:
            return f"{self.rules.name} has no pipeline"
        if pp > blocks:
            return f"pp {pp} stages for {blocks} layers"
        if not self.rules.uneven_stages and blocks % pp:
            return f"{blocks} layers do not divide by pp {pp}, which {self.rules.name} needs"
        return None
