"""Who takes part: a worker process, and what a request to it says."""

import dataclasses
import subprocess
from pathlib import Path

from kvcompare import environment
from kvcompare.workers import PeerError, Worker

PEERS = ("kvcache", "llama.cpp", "llama.cpp-native", "openvino", "transformers", "onnxruntime")
KINDS = ("concat", "preallocated", "window", "state", "none")
PREFIX_MB = 512
SCRIPTS = environment.HERE / "peers"


@dataclasses.dataclass(frozen=True)
class Contender:
    peer: str
    dtype: str = ""  # of the weights; empty: the peer's own choice
    cache: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.peer, self.dtype, self.cache)))

    @property
    def ours(self) -> bool:
        return self.peer == "kvcache"

    def request(self, request: dict) -> dict:
        if self.ours:  # its answers always have tokens and log-probabilities
            request = {key: value for key, value in request.items() if key != "check"}
        return request | ({"cache": self.cache} if self.cache else {})


# The exact path, which everyone's tokens are compared with.
REFERENCE = Contender("kvcache", "float32", "preallocated")


def choose(options) -> list[Contender]:
    """All that were asked for, ours first."""
    found = []
    for peer in options.peers:
        if peer == "kvcache":
            found += [Contender(peer, d, k) for d in options.dtypes for k in options.kinds]
        elif peer == "transformers":
            dtypes = [d for d in options.dtypes if d in ("bfloat16", "float32")]
            found += [Contender(peer, d, k) for d in dtypes for k in ("dynamic", "static")]
        else:
            found.append(Contender(peer))
    return found


class Pool:
    """Workers by peer, dtype, threads and slots, each started when it is first
    asked. One that fails is not started again: `why_not` says what it said."""

    def __init__(self, options):
        self.options = options
        self.workers = {}
        self.why_not = {}  # (peer, dtype) -> why
        self.facts = {}  # (peer, dtype) -> first line

    def get(self, contender: Contender, threads: int, slots: int = 1) -> Worker:
        key = (contender.peer, contender.dtype, threads, slots)
        if key[:2] in self.why_not:
            raise PeerError(self.why_not[key[:2]])
        if key in self.workers and self.workers[key].process.poll() is not None:
            self.workers.pop(key).stop()  # it died of an earlier request
        if key not in self.workers:
            try:
                command = self.command(contender, threads, slots)
                log = self.options.out / f"{'-'.join(filter(None, key[:2]))}-{threads}-{slots}.log"
                worker = Worker(command, threads, log, self.options.patience)
            except (PeerError, OSError) as error:
                if key[:2] not in self.facts:  # it never ran
                    self.why_not[key[:2]] = str(error)
                raise PeerError(str(error)) from None
            self.workers[key] = worker
            self.facts[key[:2]] = worker.facts
        return self.workers[key]

    def command(self, contender: Contender, threads: int, slots: int) -> list:
        model, context = self.options.model, self.options.context
        if contender.ours:
            return [
                *(self.options.kvcache, "bench", "--worker", "--model", model),
                *("--dtype", contender.dtype, "--threads", threads),
                *("--prefix-cache-mb", PREFIX_MB),
            ]
        script, python, arguments = self.script(contender)
        return [python, SCRIPTS / script, arguments[0], threads, context, slots, *arguments[1:]]

    def script(self, contender: Contender):
        """(file, its Python, model and further arguments)"""
        model = self.options.model
        python = self.options.python or environment.peers_python()
        match contender.peer:
            case "llama.cpp":
                return "llamacpp.py", python, [model]
            case "openvino":
                return "openvino_worker.py", python, [model]
            case "transformers":
                return "transformers_worker.py", python, [model, contender.dtype]
            case "onnxruntime":
                return "onnxruntime_worker.py", python, [self.onnx_folder(python)]
            case "llama.cpp-native":
                python = environment.native_python(self.options.native)
                if python is None:
                    raise PeerError("not built; --native builds it")
                return "llamacpp_native.py", python, [model]
        raise PeerError(f"unknown peer; there are {', '.join(PEERS)}")

    def onnx_folder(self, python: Path) -> Path:
        """The model as onnxruntime-genai reads it, made once."""
        folder = environment.cache_folder() / "onnx" / f"{self.options.model.stem}-int4"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            command = [python, SCRIPTS / "onnxruntime_model.py", self.options.model, folder]
            log = self.options.out / "onnxruntime-model.log"
            with open(log, "wb") as said:
                done = subprocess.run(command, stdout=said, stderr=said, check=False)
            if done.returncode != 0:
                lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
                raise PeerError(f"its builder failed: {lines[-1][:200]}")
        return folder

    def stop(self, slots_above: int = 0) -> None:
        """All workers with more slots than that."""
        for key in [key for key in self.workers if key[3] > slots_above]:
            self.workers.pop(key).stop()
