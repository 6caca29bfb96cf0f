"""The controller's memory in a ConfigMap."""

from concurrent.futures import ThreadPoolExecutor

from moebius_controller.kubernetes.memory import ConfigMapMemory
from moebius_controller.state_file import ControllerState
from tests.cluster_fakes import FakeApi
from tests.controller.cluster import CONFIG_MAP

OWNER = {
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": "a"},
}


async def test_what_made_the_config_map_still_owns_it() -> None:
    """Helm leaves behind what has lost its labels."""
    collection, _, name = CONFIG_MAP.rpartition("/")
    state = ControllerState(pid=1)
    with FakeApi() as api, ThreadPoolExecutor(1) as executor:
        api.put(collection, {"metadata": {"name": name, **OWNER}})
        memory = ConfigMapMemory(api.client(), "default", name, executor)
        assert await memory.load() is None
        for _ in range(2):
            await memory.save(state)
        found = api.get(CONFIG_MAP)
        assert found is not None
        assert found["metadata"].items() >= OWNER.items()
        assert await memory.load() == state


async def test_one_that_is_not_there_is_made() -> None:
    name = CONFIG_MAP.rpartition("/")[2]
    state = ControllerState(pid=1)
    with FakeApi() as api, ThreadPoolExecutor(1) as executor:
        memory = ConfigMapMemory(api.client(), "default", name, executor)
        assert await memory.load() is None
        await memory.save(state)
        await memory.save(state)
        assert await memory.load() == state
