"""What `lora-sidecar run` makes of its flags and its environment."""

from __future__ import annotations

import pytest

from sidecar.cli.run import FLAGS, BadValue, settings_from

GIVEN = {"backend": "standalone", "manifests": "/m", "listen": "127.0.0.1:8790"}

# As the kubelet sets them for Services of these names; a pod gets those of every Service in its namespace.
SERVICE_LINKS = {
    "LORA_SIDECAR_SERVICE_HOST": "10.0.0.7",
    "LORA_SIDECAR_SERVICE_PORT": "80",
    "LORA_SIDECAR_SERVICE_PORT_HTTP": "80",
    "LORA_SIDECAR_PORT": "tcp://10.0.0.7:80",
    "LORA_SIDECAR_PORT_80_TCP": "tcp://10.0.0.7:80",
    "LORA_SIDECAR_PORT_80_TCP_PROTO": "tcp",
    "LORA_SIDECAR_WEB_SERVICE_HOST": "10.0.0.8",
    "LORA_SIDECAR_WEB_SERVICE_PORT_HTTP": "8790",
    "LORA_SIDECAR_WEB_PORT": "tcp://10.0.0.8:8790",
    "LORA_SIDECAR_WEB_PORT_8790_TCP": "tcp://10.0.0.8:8790",
    "LORA_SIDECAR_WEB_PORT_8790_TCP_ADDR": "10.0.0.8",
}


def test_a_flag_goes_before_its_variable_and_that_before_the_default() -> None:
    environment = {"LORA_SIDECAR_CAPACITY": "7", "LORA_SIDECAR_MAX_LORA_RANK": "64"}
    settings = settings_from({**GIVEN, "capacity": "9"}, environment)
    assert (settings.capacity, settings.max_lora_rank, settings.fetch_concurrency) == (9, 64, 4)


def test_the_variables_of_services_are_no_flags() -> None:
    assert settings_from(GIVEN, SERVICE_LINKS) == settings_from(GIVEN, {})


@pytest.mark.parametrize("name", ["LORA_SIDECAR_CAPACTIY", "LORA_SIDECAR_PORT", "LORA_SIDECAR_WEB_PORT"])
def test_a_mistyped_variable_is_named(name: str) -> None:
    with pytest.raises(BadValue, match=f"{name}: no such setting"):
        settings_from(GIVEN, {name: "8790"})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("name", "x" * 254),
        ("name", "two\nlines"),
        ("zone", "x" * 254),
        ("pool", "x" * 254),
        ("advertise", "x" * 254),
        ("base_model", "x" * 513),
        ("capacity", "-1"),
        ("capacity", "\u00b2"),
        ("capacity", "9" * 5000),
        ("max_lora_rank", "1.5"),
        ("disk_quota", "lots"),
        ("ready_timeout", "nan"),
        ("allow_http", "maybe"),
        ("labels", "gpu"),
        ("log_format", "xml"),
        ("fetch_concurrency", "0"),
        ("listen", "127.0.0.1:0"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_flag(flag: str, value: str) -> None:
    with pytest.raises(BadValue, match="--" + flag.replace("_", "-")):
        settings_from({**GIVEN, flag: value}, {})


def test_a_port_that_the_system_chooses_can_be_advertised_by_another() -> None:
    assert settings_from({**GIVEN, "listen": "127.0.0.1:0", "advertise": "gateway:80"}, {}).advertise == "gateway:80"


def test_every_flag_is_a_variable_too() -> None:
    assert all(settings_from({}, {"LORA_SIDECAR_MANIFESTS": "/m", f"LORA_SIDECAR_{f.upper()}": v}) for f, v in VALUES)
    assert {f for f, _ in VALUES} == {f for f, *_ in FLAGS}


VALUES = [
    *((f, "x") for f in ("manifests", "seeds", "name", "zone", "pool", "service", "namespace", "base_model")),
    *((f, "x:1") for f in ("listen", "advertise")),
    *((f, "/x") for f in ("engine_api_key_file", "adapters_dir", "gossip_key_file")),
    *((f, "true") for f in ("allow_pickle", "allow_http", "insecure_gossip")),
    *((f, "3") for f in ("capacity", "max_lora_rank", "ready_timeout", "crd_grace", "fetch_concurrency")),
    ("backend", "standalone"),
    ("labels", "a=b"),
    ("engine_url", "http://h:1"),
    ("disk_quota", "20Gi"),
    ("log_format", "console"),
    ("log_level", "debug"),
]
