"""The links to the workers that there should be: opened, retired and closed as the list of them changes."""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from moebius_gateway.workers.link import Link
from moebius_gateway.workers.member import Member

log = structlog.get_logger(__name__)


class Roster:
    """One link for each address. `open_link` makes one, which has a task here as soon as this is started.
    `closed` is told of each that came to its end because its worker is no member any more.
    """

    def __init__(self, open_link: Callable[[Member], Link], closed: Callable[[Link], None]) -> None:
        self._open = open_link
        self._closed = closed
        self._links: dict[str, Link] = {}
        self._tasks: dict[Link, asyncio.Task[None]] = {}
        self._started = False

    @property
    def links(self) -> dict[str, Link]:
        """By address."""
        return self._links

    def start(self) -> None:
        """Begins to attach to all; returns at once."""
        self._started = True
        for link in self._links.values():
            self._run(link)

    async def stop(self) -> None:
        """Ends all links, and begins no other."""
        self._started = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def apply(self, members: Iterable[Member]) -> None:
        """From now on these are the workers. Those that are no member any more end at once."""
        wanted = {member.address: member for member in members}
        for address, link in list(self._links.items()):
            if (member := wanted.get(address)) is None or member.uid != link.member.uid:
                self._close(self._links.pop(address))
        for address, member in wanted.items():
            if address not in self._links:
                log.info("worker found", worker=member.name, address=address)
                self._links[address] = self._open(member)
                if self._started:
                    self._run(self._links[address])
            if member.retiring:
                self._links[address].retire()

    def _run(self, link: Link) -> None:
        task = self._tasks[link] = asyncio.create_task(link.run(), name=f"link {link.address}")
        task.add_done_callback(lambda _: self._tasks.pop(link, None))

    def _close(self, link: Link) -> None:
        log.info("worker gone", worker=link.member.name, address=link.address)
        link.close()
        if (task := self._tasks.get(link)) is not None:
            task.cancel()
        self._closed(link)
