"""The errors of elastic jobs; the other errors are in `asyncdist.errors`."""

from __future__ import annotations

from asyncdist.errors import RendezvousError


class JobTimeoutError(RendezvousError, TimeoutError):
    """This process became no member of a generation of its job in time.

    Attributes:
        job: The name of the job.
        present: Number of processes that were present: members of the present generation, and those that waited.
        members: Number of these that were members.
        min_size: Number of processes that a generation needs.
        generation: The number of the last generation; 0 before the first.
        timeout: Seconds for which this process waited.
    """

    def __init__(self, job: str, present: int, members: int, min_size: int, generation: int, timeout: float) -> None:
        super().__init__(job, present, members, min_size, generation, timeout)
        self.job, self.present, self.members = job, present, members
        self.min_size, self.generation, self.timeout = min_size, generation, timeout

    def _text(self) -> str:
        present = f"{self.present} process{' is' if self.present == 1 else 'es are'} present"
        what = f"after {self.timeout:.3g} s in job {self.job!r} {present}, and a generation needs {self.min_size}"
        if self.members:
            return (
                f"{what}; {self.members} of them are members of generation {self.generation}, which have not begun "
                "another: they do so where their code goes through generations(), or calls regroup()"
            )
        if self.present >= self.min_size:
            return (
                f"{what}; they have not met in this time: it takes ten seconds until one that is stopped, or whose host "
                "has vanished, is passed over, so join with a longer timeout"
            )
        if self.generation:
            return (
                f"{what}; generation {self.generation} has no member left: if the job has ended, start another one under "
                "another name; otherwise start more processes with the same address, name and token"
            )
        return f"{what}; start the others with the same address, name and token"
