"""What is run and timed: a model on a device, its targets, and the inputs of one step.

A target's size follows the model's: a toy model on a CPU is timed at a short context and a short
prompt, and every record says which.
"""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from harness import model_file
from harness.errors import UserError
from harness.policy import DEFAULT, Policy
from reference import models

TOY_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Target:
    """One thing that is timed: `batch` sequences of `tokens` new tokens ending at `context`."""

    name: str
    batch: int
    tokens: int
    context: int

    @property
    def kind(self) -> str:
        return "decode" if self.tokens == 1 else "prefill"

    def describe(self) -> str:
        return f"{self.kind} {self.batch} x {self.tokens} token(s), context {self.context}"


TARGETS = {
    t.name: t
    for t in (
        Target(name="decode-bs1", batch=1, tokens=1, context=100_000),
        Target(name="decode-bs8", batch=8, tokens=1, context=100_000),
        Target(name="decode-bs128", batch=128, tokens=1, context=16_384),
        Target(name="decode-bs256", batch=256, tokens=1, context=8_192),
        Target(name="prefill-8x2048", batch=8, tokens=2048, context=100_000),
    )
}


def target(name: str, *, toy: bool) -> Target:
    """The target called `name`, cut down for a toy model: context / 400, prompt / 32."""
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}; choose one of {', '.join(TARGETS)}")
    chosen = TARGETS[name]
    if not toy:
        return chosen
    tokens = 1 if chosen.tokens == 1 else chosen.tokens // 32
    return replace(chosen, tokens=tokens, context=max(tokens, chosen.context // 400))


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The arguments of one `model(ids, positions, cache)` call; ids, positions [B, T] int64."""

    ids: Tensor
    positions: Tensor
    cache: Any

    @property
    def args(self) -> tuple[Tensor, Tensor, Any]:
        return self.ids, self.positions, self.cache


@dataclass(kw_only=True)
class Workload:
    """A model built once on one device, and the inputs to run it with.

    `model` is the untouched reference; candidates are second trees over the same parameters
    (`optimized.change.share`), so that weights never exist twice.
    """

    name: str
    preset: str
    device: torch.device
    seed: int
    file: models.ModelFile
    config: Any
    policy: Policy = DEFAULT  # of verdicts on its candidates

    @classmethod
    def load(cls, model: str, preset: str, device: str, seed: int = 0) -> "Workload":
        """Find the model file and its preset; `auto` picks the smallest on a CPU, and the largest
        that fits on a GPU. A toy model on a CPU gets one thread. Bad names raise UserError."""
        file = model_file.load(model)
        kind = pick_device(device)
        if preset == "auto":
            preset = _auto_preset(file, kind)
        if preset not in file.configs:
            known = ", ".join(file.configs)
            raise UserError(f"model {model} has no preset {preset!r}; choose one of {known}")
        workload = cls(
            name=model,
            preset=preset,
            device=kind,
            seed=seed,
            file=file,
            config=file.configs[preset],
        )
        if kind.type == "cpu" and workload.toy:
            # Operators of some microseconds gain nothing from a second thread, and wait for it: on
            # two cores with another process running, a decode of 7 ms took 1 s (2026-11-29).
            torch.set_num_threads(1)
        return workload

    @cached_property
    def weight_bytes(self) -> int:
        meta = self.file.build(self.config, "meta", self.seed)
        return sum(t.nbytes for t in meta.state_dict().values())

    @cached_property
    def parameters(self) -> int:
        meta = self.file.build(self.config, "meta", self.seed)
        return sum(t.numel() for t in meta.state_dict().values())

    @property
    def note(self) -> str:
        """What a preset says about itself, for every report: the `note` of its configuration."""
        return getattr(self.config, "note", "")

    @property
    def toy(self) -> bool:
        return self.parameters < TOY_PARAMETERS

    def target(self, name: str) -> Target:
        return target(name, toy=self.toy)

    @cached_property
    def model(self) -> nn.Module:
        """The reference with its weights drawn on the device; UserError if it cannot fit, or, of a
        model file, cannot be called."""
        self.require_memory()
        model = self.file.build(self.config, self.device, self.seed)
        if isinstance(self.file, model_file.GivenFile):
            self.file.try_out(model, self.config, self.device)
        return model

    def require_callable(self) -> None:
        """Build the model now, rather than when it is first needed; UserError as `model` says."""
        _ = self.model

    def require_memory(self, *targets: Target) -> None:
        """Raise UserError unless the weights and the caches of `targets` fit beside each other."""
        free = free_bytes(self.device)
        caches = sum(self.cache_bytes(target) for target in targets)
        if self.weight_bytes + caches > free:
            raise UserError(
                f"{self.name} {self.preset} needs {self.weight_bytes / 2**30:.1f} GiB for its "
                f"weights and {caches / 2**30:.1f} GiB for KV caches, {self.device} has "
                f"{free / 2**30:.1f} GiB free; choose another target or preset: "
                + ", ".join(self.file.configs)
            )

    def cache_bytes(self, target: Target) -> int:
        """Bytes of the KV cache that `target` needs."""
        cache = self.file.cache(self.config, target.batch, target.context, "meta")
        return sum(t.nbytes for t in tensors_in(cache))

    def inputs(self, target: Target, *, seed: int = 0) -> StepInputs:
        """Random token ids at the end of `target.context`, over a cache filled with random values.

        All sequences have the same length, so the cache promises aligned ends.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = target.batch, target.tokens
        vocabulary = self.vocabulary
        ids = torch.randint(vocabulary, shape, generator=generator, device=self.device)
        first = target.context - target.tokens
        positions = torch.arange(first, target.context, device=self.device)
        positions = positions.expand(shape).contiguous()
        cache = self.file.cache(self.config, target.batch, target.context, self.device)
        for layer in getattr(cache, "layers", ()):
            for tensor in (layer.k, layer.v):
                tensor.normal_(generator=generator)
        if hasattr(cache, "ends_aligned"):
            cache.ends_aligned = True
        return StepInputs(ids=ids, positions=positions, cache=cache)

    @property
    def vocabulary(self) -> int:
        """The number of token ids: the rows of the model's first embedding."""
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                return module.num_embeddings
        raise UserError(f"model {self.name} has no nn.Embedding, so its token ids are unknown")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dataclasses, sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for f in fields(value):
            yield from tensors_in(getattr(value, f.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}; choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device is visible to this PyTorch "
            f"({torch.__version__}); use --device cpu, or install a CUDA build of torch"
        )
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def give_back(device: torch.device) -> None:
    """What PyTorch keeps of a card's memory and does not use, so that it counts as free."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """The memory that is free there, without what PyTorch keeps of a card's: see `give_back`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    raise UserError("cannot read the free memory of this machine from /proc/meminfo")


def _auto_preset(file: models.ModelFile, device: torch.device) -> str:
    """The largest preset whose weights leave a tenth of the memory free; on a CPU the smallest."""
    sizes = {}
    for name, config in file.configs.items():
        meta = file.build(config, "meta", 0)
        sizes[name] = sum(t.nbytes for t in meta.state_dict().values())
    if device.type == "cpu":
        return min(sizes, key=lambda name: sizes[name])
    fitting = {n: s for n, s in sizes.items() if s < 0.9 * free_bytes(device)}
    return max(fitting or sizes, key=lambda name: sizes[name])
