"""The token cache when several processes come at once: as ranks of one job, and as jobs of their own."""

from __future__ import annotations

from pathlib import Path

from lockstep.comm.communicator import Communicator
from lockstep.data.tokens import prepare_tokens
from lockstep.testing.worlds import run_processes


def both_ways(comm: Communicator, folder: str) -> tuple[str, str]:
    """Digests of the tokens made as one of several jobs, and as a rank of one job."""
    corpus = Path(folder) / "corpus"
    comm.barrier()
    alone = prepare_tokens(corpus, kind="bpe", vocab_size=300, held_out=0.1, cache=Path(folder) / "jobs")
    together = prepare_tokens(corpus, kind="bpe", vocab_size=300, held_out=0.1, cache=Path(folder) / "ranks", comm=comm)
    return alone.digest, together.digest


def test_processes_at_once_make_one_whole_entry(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(12):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"document {number}: the cat sat on the mat\n" * 300)
    digests = run_processes(3, both_ways, str(tmp_path))
    assert len({digest for pair in digests for digest in pair}) == 1
    for name in ("jobs", "ranks"):
        left = sorted(path.suffix for path in (tmp_path / name / "tokens").iterdir())
        assert left == ["", ".lock"]
