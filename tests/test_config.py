"""Settings from the environment: parsing, errors, and warnings about misspelt variables."""

from __future__ import annotations

import asyncio
import os
from dataclasses import fields

import pytest
import torch

from asyncdist import config as config_module
from asyncdist.config import Config, variable_of
from asyncdist.environment import TorchHooks
from asyncdist.errors import UsageError
from asyncdist.testing.cluster import world_of


def test_misspelt_setting_is_logged_once_with_a_suggestion(caplog):
    for _ in range(2):
        assert Config.from_environment({"ASYNCDIST_TRNSPORT": "tcp"}).transport == "auto"
    (message,) = caplog.messages
    assert message.startswith("ASYNCDIST_TRNSPORT is not a setting; did you mean ASYNCDIST_TRANSPORT?")


def test_kubernetes_service_variables_are_not_reported_as_misspelt(caplog):
    ports = ["PORT", "PORT_29500_TCP", "PORT_29500_TCP_ADDR", "PORT_29500_TCP_PORT", "PORT_29500_TCP_PROTO"]
    injected = [f"ASYNCDIST_STORE_{name}" for name in ("SERVICE_HOST", "SERVICE_PORT", *ports)]
    injected.append("ASYNCDIST_PORT")
    assert Config.from_environment(dict.fromkeys(injected, "1")) == Config()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("ASYNCDIST_PIECE_NBYTES", " 64K ", "piece_nbytes", 65536),
        ("ASYNCDIST_TIMEOUT", "2.5", "timeout", 2.5),
        ("ASYNCDIST_ALLOW_PICKLE", "Yes", "allow_pickle", True),
        ("ASYNCDIST_TLS_CHECK_HOSTNAME", "0", "tls_check_hostname", False),
        ("ASYNCDIST_HEARTBEAT", "0", "heartbeat", 0.0),
        ("ASYNCDIST_HEARTBEAT", "0.5", "heartbeat", 0.5),
        ("ASYNCDIST_TOKEN", "", "token", None),
        ("ASYNCDIST_STORE_C10D", " Loopback ", "store_c10d", "loopback"),
    ],
)
def test_setting_is_parsed(variable, text, field, value):
    assert getattr(Config.from_environment({variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("ASYNCDIST_TCP_LANES", "two", "is not a whole number"),
        ("ASYNCDIST_SPIN_US", "soon", "is not a number"),
        ("ASYNCDIST_TCP_LANES", "-1", "is not a whole number from 0 up"),
        ("ASYNCDIST_SHM_AREA_NBYTES", "0K", "is not a whole number from 1 up"),
        ("ASYNCDIST_SEGMENT_NBYTES", "0", "is not a whole number from 1 up"),
        ("ASYNCDIST_TIMEOUT", "nan", "is not a number from 0 up"),
        ("ASYNCDIST_TIMEOUT", "-1", "is not a number from 0 up"),
        ("ASYNCDIST_HANDSHAKE_TIMEOUT", "nan", "is not a number from 0.1 up"),
        ("ASYNCDIST_HANDSHAKE_TIMEOUT", "0", "is not a number from 0.1 up"),
        ("ASYNCDIST_TCP_LANES", "9223372036854775808", "is too large"),
        ("ASYNCDIST_FLIGHT_RECORDER", "8589934592G", "is too large"),
        ("ASYNCDIST_HEARTBEAT", "0.4", "is not a number from 0.5 up, and not 0"),
        ("ASYNCDIST_HEARTBEAT", "nan", "is not a number from 0.5 up, and not 0"),
        ("ASYNCDIST_ALLOW_PICKLE", "perhaps", "is not 0 or 1"),
        ("ASYNCDIST_STORE_C10D", "lan", "is not one of auto, off, loopback, any"),
    ],
)
def test_unparsable_setting_names_its_variable(variable, text, message):
    with pytest.raises(UsageError, match=f"{variable}='{text}' {message}"):
        Config.from_environment({variable: text})


@pytest.mark.parametrize("field", fields(Config), ids=lambda field: field.name)
def test_value_that_is_not_text_is_refused(field):
    variable = variable_of(field)
    with pytest.raises(UsageError, match=rf"{variable}='a\\udcff' has bytes that are not UTF-8"):
        Config.from_environment({variable: os.fsdecode(b"a\xff")})


@pytest.mark.parametrize(("text", "meant"), [("1", "any"), ("0", "auto")])
def test_deprecated_variable_for_c10d_is_translated_with_a_warning(caplog, monkeypatch, text, meant):
    monkeypatch.setattr(config_module, "_warned", set())
    former = {"ASYNCDIST_ALLOW_UNAUTHENTICATED_C10D": text}
    assert Config.from_environment(former).store_c10d == meant
    assert Config.from_environment({**former, "ASYNCDIST_STORE_C10D": "off"}).store_c10d == "off"
    (message,) = caplog.messages
    assert "deprecated: set ASYNCDIST_STORE_C10D=any" in message


@pytest.mark.parametrize(
    ("variables", "flight_recorder", "nan_check"),
    [
        ({}, False, False),
        ({"TORCH_FR_BUFFER_SIZE": "100"}, True, False),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "100", "TORCH_DIST_NAN_CHECK": "1"}, True, True),
        ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}, False, False),
        ({"TORCH_DIST_NAN_CHECK": "0"}, False, False),
        ({"TORCH_FR_DUMP_ON_TIMEOUT": "1"}, True, False),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "no"}, False, False),
        ({"TORCH_FR_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"}, False, False),
    ],
)
def test_hooks_of_torch_are_those_that_its_variables_ask_for(variables, flight_recorder, nan_check):
    hooks = TorchHooks.from_environment(variables)
    assert (hooks.flight_recorder, hooks.nan_check) == (flight_recorder, nan_check)
    assert hooks.observe == (flight_recorder or nan_check)


LEAST = {f.name: f.metadata["least"] for f in fields(Config) if type(f.default) in (int, float)}
LIMITS = {"timeout", "max_message_nbytes"}  # with their least values nothing can be sent
OF_THE_PROCESS = ("store_", "metrics_")
"""Settings that have no effect on ranks, or one that outlives the world."""


@pytest.mark.parametrize("name", [name for name in LEAST if name not in LIMITS and not name.startswith(OF_THE_PROCESS)])
async def test_rank_setting_works_at_its_least_value(transport, name):
    config = Config(**{"lanes": 2, name: LEAST[name]})
    async with world_of(2, transport=transport, config=config) as groups:
        for count in (1, 3000):
            tensors = [torch.ones(count) for _ in groups]
            await asyncio.gather(*(group.all_reduce(own) for group, own in zip(groups, tensors, strict=True)))
            await asyncio.gather(*(group.broadcast(own, 0) for group, own in zip(groups, tensors, strict=True)))
            await asyncio.gather(groups[0].send(tensors[0], 1), groups[1].recv(tensors[1], 0))
            assert all(own.eq(2).all() for own in tensors)
