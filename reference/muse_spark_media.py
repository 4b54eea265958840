"""Images, videos and sound in a prompt: what they are, and where their tokens stand.

A prompt holds a placeholder token for every token that an encoder makes, in order; the encoders'
rows stand in for those tokens' embeddings. A video's sound track is an input of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.muse_spark_audio import AudioEncoder
from reference.muse_spark_config import MuseSparkConfig, VisionConfig
from reference.muse_spark_vision import Grids, patchify


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Patches [N, values] of images, or of videos, and their grids."""

    patches: Tensor
    grids: Grids

    @classmethod
    def of(cls, clips: list[Tensor], config: VisionConfig) -> "Pictures":
        """From pixels [F, 3, height, width] each; an image has one frame."""
        made = [patchify(frames, config) for frames in clips]
        return cls(patches=torch.cat([patches for patches, _ in made]), grids=[g for _, g in made])


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Clips at 24 kHz, samples [C, S], zeros after the first `lengths` of each."""

    samples: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, clips: list[Tensor], samples_per_token: int) -> "Sound":
        """From waveforms [samples] each, padded to the longest one's whole tokens."""
        lengths = [len(clip) for clip in clips]
        longest = -(-max(lengths) // samples_per_token) * samples_per_token
        samples = torch.stack([torch.nn.functional.pad(c, (0, longest - len(c))) for c in clips])
        return cls(samples=samples, lengths=lengths)


@dataclass(frozen=True, kw_only=True)
class Media:
    """What a prompt holds besides text."""

    images: Pictures | None = None
    videos: Pictures | None = None
    sound: Sound | None = None


def heard(encoder: AudioEncoder, sound: Sound) -> Tensor:
    """The tokens of all clips, one after the other, [n, D]: those that hold samples."""
    encoded = encoder(sound.samples)
    counts = (-(-length // encoder.samples_per_token) for length in sound.lengths)
    return torch.cat([rows[:n] for rows, n in zip(encoded, counts, strict=True)])


def placed(h: Tensor, ids: Tensor, placeholder: int, rows: Tensor, what: str) -> Tensor:
    """`h` [B, T, D] with `rows` [n, D], in order, where `ids` [B, T] is `placeholder`.

    Raises ValueError unless there are n such places.
    """
    there = ids == placeholder
    if (count := int(there.sum())) != len(rows):
        raise ValueError(
            f"the prompt has {count} {what} placeholders (token {placeholder}), the encoder made "
            f"{len(rows)} tokens; put one placeholder for each"
        )
    return h.masked_scatter(there[..., None], rows.to(h.dtype))


def placeholders(config: MuseSparkConfig, media: Media) -> dict[str, list[int]]:
    """How many placeholders each image, video and clip of `media` needs."""
    merge = config.vision.merge**2 if config.vision else 1
    per_token = config.audio.samples_per_token if config.audio else 1
    pictures = {"image": media.images, "video": media.videos}
    counts = {
        name: [t * h * w // merge for t, h, w in p.grids] if p else []
        for name, p in pictures.items()
    }
    lengths = media.sound.lengths if media.sound else []
    return {**counts, "audio": [-(-length // per_token) for length in lengths]}
