"""``python -m executor.profiler.linkworker SESSION``: one rank that measures links, started by
torchrun. ``SESSION`` is the JSON file of a ``LinkSession``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from executor.profiler.linksession import LinkSession
from executor.rank import run_rank

__all__ = ["main"]


def main() -> None:
    """Measure as this rank."""
    session = LinkSession.read(Path(sys.argv[1]))

    def work() -> None:
        import torch.distributed as dist  # noqa: PLC0415 - its errors are ours too

        from executor.profiler.linkrank import LinkRank  # noqa: PLC0415 - as well

        dist.init_process_group(session.backend)
        LinkRank(session).run()
        dist.destroy_process_group()

    run_rank(work, session.out)


if __name__ == "__main__":
    main()
