"""What fault tests ask of a stack."""

from moebius_cli.view import StackView
from tests.stack import Stack
from tests.waiting import until


async def all_ready(running: Stack) -> StackView:
    """The view of the stack once every worker serves, and the gateway knows of it."""

    async def ready() -> StackView | None:
        view = await running.view()
        if not all(worker.state == "READY" for worker in view.workers):
            return None
        known = await running.metric("moebius_gateway_workers", 'state="READY"')
        return view if known == len(view.workers) else None

    view = await until(ready, "all workers are ready")
    assert isinstance(view, StackView)
    return view


def gateway_pid(view: StackView) -> int:
    assert view.gateway is not None
    return view.gateway.pid
