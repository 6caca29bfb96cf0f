"""The controller's state in a ConfigMap, so that the next leader goes on where this one was."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from kubernetes import client

from moebius_cluster.failures import FAILURES, reason_of
from moebius_controller.state_file import ControllerState, StaleMemoryError, parse_state, write_state

KEY = "state.json"
TIMEOUTS = (3.0, 10.0)


class ConfigMapMemory:
    """Implements `Memory`. A write carries the version that was read or written before."""

    interval = 5.0

    def __init__(self, api: client.ApiClient, namespace: str, name: str, executor: Executor) -> None:
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._name = name
        self._executor = executor
        # As it was read or written last: its version, and labels of whoever made it. None: it is not there.
        self._metadata: dict[str, Any] | None = None

    async def load(self) -> ControllerState | None:
        try:
            found = await self._call(self._core.read_namespaced_config_map, self._name)
        except client.ApiException as error:
            if error.status != 404:
                raise OSError(reason_of(error)) from error
            self._metadata = None
            return None
        except FAILURES as error:
            raise OSError(reason_of(error)) from error
        self._metadata = found["metadata"]
        text = (found.get("data") or {}).get(KEY)
        return parse_state(text.encode(), f"ConfigMap {self._name}") if text else None

    async def save(self, state: ControllerState) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata or {"name": self._name, "namespace": self._namespace},
            "data": {KEY: write_state(state).decode()},
        }
        try:
            if self._metadata is None:
                written = await self._call(self._core.create_namespaced_config_map, body=body)
            else:
                written = await self._call(self._core.replace_namespaced_config_map, self._name, body=body)
        except client.ApiException as error:
            # Gone, there meanwhile, or written by another one.
            if error.status in (404, 409):
                raise StaleMemoryError from error
            raise OSError(reason_of(error)) from error
        except FAILURES as error:
            raise OSError(reason_of(error)) from error
        self._metadata = written["metadata"]

    async def _call(self, call: Callable[..., Any], *arguments: str, **more: Any) -> dict[str, Any]:
        def wait() -> dict[str, Any]:
            response = call(
                *arguments,
                namespace=self._namespace,
                _preload_content=False,
                _request_timeout=TIMEOUTS,
                **more,
            )
            answer: dict[str, Any] = json.loads(response.data)
            return answer

        return await asyncio.get_running_loop().run_in_executor(self._executor, wait)
