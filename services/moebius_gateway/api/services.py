"""What the routes work with; made once when the app is built."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from moebius_gateway.admission.gate import Gate
from moebius_gateway.api.backend import Backend
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.auth.key_ring import KeyRing
from moebius_gateway.metrics import GatewayMetrics
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.text.registry import TextModels


@dataclass(frozen=True, slots=True)
class Services:
    settings: GatewaySettings
    backend: Backend
    texts: TextModels
    lifecycle: Lifecycle
    metrics: GatewayMetrics
    registry: CollectorRegistry
    gate: Gate
    keys: KeyRing
