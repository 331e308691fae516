# SPDX-License-Identifier: MIT
"""Runs every command, and the functions that engines use, in environments like those in containers.

The environments are: a user with no home directory and no passwd entry, a read-only home, a full or
inaccessible /dev/shm, and no /proc. The interpreter may be in a directory that only root can read,
so the user keeps the capability to read (but not to write) every file.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyvmem.commands.cli import _COMMANDS

UID = 12345
USER = shlex.split(
    f"setpriv --reuid {UID} --regid {UID} --clear-groups --bounding-set=-all,+dac_read_search "
    "--inh-caps=-all,+dac_read_search --ambient-caps=+dac_read_search"
)
PLACES = {
    "no home": "true",
    "home cannot be written": "true",
    "/dev/shm is full": "mount -t tmpfs -o size=4k,mode=1777 none /dev/shm",
    "/dev/shm is closed": "mount -t tmpfs -o mode=755 none /dev/shm",
    "no /proc": "mount -t tmpfs none /proc",
}
SIMILAR = ("home cannot be written", "/dev/shm is closed")
# Programs that import transformers, which takes ten seconds, run in fewer environments unless this
# is a long run.
FEWER = [
    pytest.param(place, marks=pytest.mark.long) if place in SIMILAR else place for place in PLACES
]
MAIN = "import sys; from pyvmem.commands.cli import main; sys.exit(main(sys.argv[1:]))"

# per command: arguments, exit status, and part of stderr's only line
CALLS: dict[str, list[tuple[str, int, str]]] = {
    "probe": [("", 0, ""), ("--report", 0, ""), ("--json", 0, "")],
    "features": [("", 0, "")],
    "selftest": [("--backend host", 0, "")],
    "bench": [("api --quick --backend host --only calls,live", 0, "")],
    "layouts": [("--model SmolLM2-135M --requests 20", 0, "")],
    "top": [("--once", 0, ""), ("--json", 0, "")],
    "watch": [("http://127.0.0.1:1 --once", 1, "Connection refused")],
    "limit": [("nobody 1G", 1, "no engine 'nobody'")],
    "control": [("--listen 127.0.0.1:0", 2, "--listen needs --token-file")],
    "completion": [("bash", 0, "")],
    "serve-demo": [("--backend host --max-new-tokens 2 --num-prompts 2 --verify", 0, "")],
}

CACHE = """
from pyvmem import Context, KVCache, KVCacheConfig, announce
from pyvmem.engine import Policy, RequestCache
from pyvmem.ledger import LedgerError
from pyvmem.telemetry import Telemetry

with Context("host") as context:
    config = KVCacheConfig(2, 4, 64, max_batch=4)
    with KVCache(config, context) as cache:
        lengths = [0] * 4
        lengths[cache.alloc_reqid()] = 100
        assert cache.step(lengths) == 0
        telemetry = Telemetry()
        telemetry.add(cache, "x")
        assert "pyvmem_pages" in telemetry.text()
        try:
            with announce(cache):
                print("announced")
        except LedgerError as error:
            print(error)
"""

PLUG = """
import torch
import transformers

from pyvmem.hf import VMemCache
from pyvmem.hf.keyword import CACHE

torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=99, eos_token_id=None, pad_token_id=0,
)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.randint(1, 99, (2, 9))
options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
with VMemCache(config, 4, 64, backend="host") as past:
    own = model.generate(ids, **{CACHE: past}, **options)
assert own.equal(model.generate(ids, **options))
"""


@pytest.fixture(scope="module")
def spaces() -> None:
    """Skips the tests if they cannot become another user or create a mount namespace."""
    if os.geteuid() or not shutil.which("setpriv") or not shutil.which("unshare"):
        pytest.skip("needs root, setpriv and unshare")
    words = ["unshare", "-m", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot create a mount namespace: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def folder(spaces: None) -> Iterator[Path]:
    """Creates a directory with a read-only `home`, and a world-writable `work` and `tmp`."""
    with tempfile.TemporaryDirectory(prefix="vmem-bare-") as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "home").mkdir(mode=0o555)
        for open_to_all in ("work", "tmp"):
            (path / open_to_all).mkdir()
            (path / open_to_all).chmod(0o1777)
        yield path


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """Creates a tiny model in transformers' format."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {text: at for at, text in enumerate(["<pad>", "<end>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        pad_token_id=0,
        eos_token_id=1,
    )
    path = folder / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    return path


def _run(folder: Path, place: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments as the restricted user in the given environment; checks that
    it leaves no files in its working directory.
    """
    environment = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if place == "home cannot be written":
        environment["HOME"] = str(folder / "home")
    shell = ["unshare", "-m", "--propagation", "private", "sh", "-c"]
    shell += [PLACES[place] + ' && exec "$@"', "sh", *USER, sys.executable, *words]
    done = subprocess.run(
        shell,
        check=False,
        env=environment,
        cwd=folder / "work",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not any((folder / "work").iterdir()), "files were left in the working directory"
    assert not any((folder / "home").iterdir())
    return done


def test_every_command_is_called() -> None:
    assert set(CALLS) == set(_COMMANDS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", [name for name in CALLS if name != "serve-demo"])
@pytest.mark.slow
def test_a_command(command: str, place: str, folder: Path) -> None:
    _check(command, place, folder)


@pytest.mark.parametrize("place", FEWER)
@pytest.mark.slow
def test_the_demo(place: str, folder: Path, model: Path) -> None:
    _check("serve-demo", place, folder, f"--model {model}")


def _check(command: str, place: str, folder: Path, more: str = "") -> None:
    """Runs each of a command's `CALLS` with the extra arguments `more` and checks the results."""
    for words, status, said in CALLS[command]:
        line = f"{words} {more}".split()
        done = _run(folder, place, ["-c", MAIN, command, *line])
        assert done.returncode == status, (words, done.stdout, done.stderr)
        errors = done.stderr.strip().splitlines()
        if status:
            assert len(errors) == 1, done.stderr
            assert said in errors[0]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.slow
def test_a_cache(place: str, folder: Path) -> None:
    done = _run(folder, place, ["-c", CACHE])
    assert done.returncode == 0, (done.stdout, done.stderr)
    reasons = {
        "/dev/shm is full": "No space left on device",
        "/dev/shm is closed": "Permission denied",
    }
    assert reasons.get(place, "announced") in done.stdout
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("place", FEWER)
@pytest.mark.slow
def test_transformers_integration(place: str, folder: Path, model: Path) -> None:
    done = _run(folder, place, ["-c", PLUG])
    assert done.returncode == 0, (done.stdout, done.stderr)


@pytest.mark.parametrize("place", ["no home", "home cannot be written"])
@pytest.mark.slow
def test_where_a_converted_model_goes(place: str, folder: Path) -> None:
    """The model goes to a private directory inside the temporary one; a directory of that name that
    belongs to another user is rejected.
    """
    ask = "from pyvmem.serve.model import cache_dir; print(cache_dir())"
    own = folder / "tmp" / f"vmem-{UID}"
    done = _run(folder, place, ["-c", ask])
    assert done.stdout.strip() == str(own), done.stderr
    assert own.stat().st_uid == UID
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    own.mkdir(mode=0o777)
    done = _run(folder, place, ["-c", ask])
    assert "AccessDenied" in done.stderr
    own.rmdir()


NO_NUMPY = """
import sys
sys.modules["numpy"] = None  # import numpy fails
from pyvmem import Context, KVCache, KVCacheConfig
config = KVCacheConfig(2, 4, 64, max_batch=4)
with Context("host") as context:
    if sys.argv[1] == "cache":
        with KVCache(config, context) as cache:
            assert cache.k(0).shape[0] == 4
    else:
        with context.reserve(1 << 21) as reservation:
            assert reservation.tensor((8,), "float32").shape[0] == 8
assert "torch" in sys.modules
"""


@pytest.mark.parametrize("of", ["cache", pytest.param("reservation", marks=pytest.mark.long)])
def test_tensors_without_numpy_are_released(of: str) -> None:
    """Without numpy, torch keeps alive the frames that first import it, along with their locals."""
    pytest.importorskip("torch")
    words = [sys.executable, "-W", "ignore", "-c", NO_NUMPY, of]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
