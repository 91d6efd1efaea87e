"""Where tasks may go: addresses, resources, and which machines are of one kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quantkit.cli.main import run as run_command
from quantkit.core.errors import InputError
from quantkit.engine.library import BuildFacts
from quantkit.engine.settings import Offload
from quantkit.job.dask_kind import Kind, differences
from quantkit.job.dask_options import check_scheduler, is_trusted, parse_resources, read_dask, task_resources

KIND = Kind(build=BuildFacts(backend="CPU", llama_cpp_python="1", llama_cpp_commit="abc", system_info="AVX2 = 1"), libraries="l",
            quantkit="q", numpy="2.4 AVX2", cpu="AuthenticAMD 25 17", system="Linux x86_64 glibc 2.36", devices=())


@pytest.mark.parametrize(("given", "full"), [
    ("tls://host.example:9000", "tls://host.example:9000"), ("tls://10.0.0.5", "tls://10.0.0.5:8786"),
    ("tcp://127.0.0.1:8786", "tcp://127.0.0.1:8786"), ("127.0.0.1:1", "tcp://127.0.0.1:1"), ("127.8.8.8", "tcp://127.8.8.8:8786"),
    ("tcp://[::1]:8786", "tcp://[::1]:8786"), ("localhost:8786", "tcp://localhost:8786"),
])
def test_tls_and_this_machine_are_spoken_with(given: str, full: str) -> None:
    assert check_scheduler(given) == full


@pytest.mark.parametrize("given", ["tcp://10.0.0.5:8786", "10.0.0.5", "tcp://host.example:8786", "0.0.0.0:8786", "tcp://[::]:8786",
                                   "tcp://127.0.0.1.example:8786", "tcp://localhost.example", "tcp://2130706433:8786"])
def test_an_open_network_is_refused_before_anything_is_connected_to(given: str) -> None:
    with pytest.raises(InputError, match="expected a Dask scheduler that is reached over TLS"):
        check_scheduler(given)


@pytest.mark.parametrize("given", ["", "tcp://", "inproc://127.0.0.1/1/2", "ws://127.0.0.1:8786", "http://localhost:8787",
                                   "ucx://127.0.0.1:1", "tls://host:port", "scheduler.json/x", "tls://host:1/path", "tls://[::1:1"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(InputError, match="expected the address of a Dask scheduler for --dask, such as"):
        check_scheduler(given)


def test_workers_are_held_to_the_same_rule() -> None:
    addresses = ["tls://10.0.0.5:1", "tcp://127.0.0.1:1", "tcp://10.0.0.5:1", "inproc://127.0.0.1/1/1"]
    assert [is_trusted(address) for address in addresses] == [True, True, False, False]


def test_resources() -> None:
    assert parse_resources("") == {}
    assert parse_resources("GPU=1, DISK=0.5,") == {"GPU": 1.0, "DISK": 0.5}
    for wrong in ("GPU", "GPU=", "=1", "GPU=none", "GPU=0", "GPU=-1", "GPU=inf", "GPU=nan"):
        with pytest.raises(InputError, match="expected resources such as GPU=1 for --dask-resources"):
            parse_resources(wrong)


@pytest.mark.parametrize(("offload", "asked", "taken"), [
    (Offload(), "", {}), (Offload(n_gpu_layers=20), "", {"GPU": 1.0}), (Offload(n_gpu_layers=-1), "", {"GPU": 1.0}),
    (Offload(n_gpu_layers=99, tensor_split=(3.0, 0.0, 1.0)), "", {"GPU": 2.0}),
    (Offload(n_gpu_layers=99), "BIG_GPU=1", {"BIG_GPU": 1.0}), (Offload(), "CORES=2", {"CORES": 2.0}),
])
def test_a_task_takes_a_gpu_for_every_device_of_the_offload(offload: Offload, asked: str, taken: dict[str, float]) -> None:
    assert task_resources(read_dask("127.0.0.1", asked), offload) == taken


def test_machines_of_one_kind_and_of_two() -> None:
    assert differences(KIND, dataclasses.replace(KIND)) == []
    assert differences(KIND, dataclasses.replace(KIND, numpy="1.26 AVX2")) == ["numpy: expected 2.4 AVX2, found 1.26 AVX2"]
    built = dataclasses.replace(KIND, libraries="m", build=dataclasses.replace(KIND.build, system_info="AVX512 = 1"))
    assert differences(KIND, built) == ["libraries: expected l, found m", "system_info: expected AVX2 = 1, found AVX512 = 1"]
    assert differences(KIND, dataclasses.replace(KIND, devices=("A", "B"))) == ["devices: expected , found A, B"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--dask", "tcp://10.0.0.5:8786"], "expected a Dask scheduler that is reached over TLS"),
    (["--dask", "127.0.0.1:1", "--dask-resources", "GPU"], "expected resources such as GPU=1"),
    (["--dask-fetch", "user/model"], "expected --dask with a scheduler beside"),
])
@pytest.mark.parametrize("verb", [["run"], ["audit", "q.gguf"]])
def test_the_command_line_refuses_in_one_sentence(verb: list[str], arguments: list[str], message: str, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*verb, "-b", "b.gguf", "-p", "demo-v1", "-o", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_pack_has_no_base_to_stand_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "run")
    assert run_command(["audit", "q.gguf", "--ref", "r", "-p", "demo-v1", "-o", output, "--dask", "127.0.0.1:1"]) == 2
    assert "--dask needs the base" in capsys.readouterr().err
