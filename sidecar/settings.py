"""What an agent is told at its start: frozen, typed, each value with unit, default and why."""

from __future__ import annotations

from typing import Literal

from sidecar.model import Frozen

MIB = 1024 * 1024


class Settings(Frozen, frozen=True, kw_only=True):
    """Everything `lora-sidecar run` can be told. Field names are the flags' names with `_` for `-`."""

    backend: Literal["kubernetes", "standalone"] = "standalone"
    # Standalone: where manifests lie, and whom to ask for their records.
    manifests: str = ""
    seeds: tuple[str, ...] = ()
    # The stable name that placement hashes. Default: the advertised host:port (standalone), the pod (Kubernetes).
    name: str = ""
    zone: str = ""
    # Whoever says another pool's name is no peer.
    pool: str = "default"
    # Standalone: what spec.workers selects by (in Kubernetes these are the pod's labels).
    labels: dict[str, str] = {}
    namespace: str = ""
    service: str = ""
    listen: str = "0.0.0.0:8790"
    advertise: str = ""
    engine_url: str = "http://127.0.0.1:8000"
    engine_api_key_file: str = ""
    adapters_dir: str = "/adapters"
    base_model: str = ""
    # 0: ask the engine, else vLLM's own default of one, with a warning.
    capacity: int = 0
    # 0: no limit known here; the engine says no by itself.
    max_lora_rank: int = 0
    # Bytes; 0 keeps everything. An update needs room for old and new at once.
    disk_quota: int = 0
    allow_pickle: bool = False
    allow_http: bool = False
    gossip_key_file: str = ""
    insecure_gossip: bool = False
    # Seconds from the engine's first answer after which /readyz answers 200 anyway; 0 never gates.
    ready_timeout: float = 120.0
    # Kubernetes: seconds for which adapters that are missing after their CRD was gone stay as they were.
    crd_grace: float = 600.0
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    # A big adapter on a cold disk takes minutes; a hung engine must not hold a name for ever.
    load_timeout: float = 300.0
    unload_timeout: float = 30.0
    # One look a second: an engine counts as up for 3 s after an answer (contract §4.1), so two may be lost.
    engine_interval: float = 1.0
    engine_up_window: float = 3.0
    # A started agent waits this long for the records of its peers before it loads anything new (contract §4.1).
    settle_seconds: float = 5.0
    # How long copies that aren't the last are kept for targets that never report (contract §5).
    handover_patience: float = 600.0
    # Between the first look at the new holders and the second, directly before the unload (contract §5).
    look_again_seconds: float = 3.0
    # An unloaded revision's files stay at least this long: vLLM may still read them (contract §5).
    keep_files_seconds: float = 600.0
    # Largest content that every target reads from the origin without waiting for the pool's decision (contract §4).
    small_content: int = 16 * MIB
    # Bytes and files of one adapter; more is a mistake in the URI far more often than an adapter.
    max_adapter_bytes: int = 32 * 1024 * MIB
    fetch_concurrency: int = 4
