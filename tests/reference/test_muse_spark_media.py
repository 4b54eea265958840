"""Images, video frames and sound: each encoder against transformers with the same weights, and a
prompt that holds them all."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import muse_spark
from reference.muse_spark import MuseSpark
from reference.muse_spark_config import AudioConfig, VisionConfig, parameter_count
from reference.muse_spark_media import Media, Pictures, Sound, placeholders
from reference.muse_spark_vision import patchify
from tests.reference import muse_spark_oracle as oracle
from tests.reference import muse_spark_toy as toy
from tests.reference import small
from tests.reference.muse_spark_toy import SMALL, reorderings
from tests.reference.noise import assert_within, distance, permutation, undo, within
from tests.reference.published_rounding import PublishedAttend

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
ORDERINGS = 16
VISION = VisionConfig(layers=4, hidden=64, heads=2, ff=96, patch=2, grid=4, merge=2, adapter=80)
AUDIO = AudioConfig(patches=(4, 3), widths=(24, 40), depths=(2, 1), ff_ratio=2)
BOTH = replace(SMALL, vision=VISION, audio=AUDIO, image_id=157, video_id=158, audio_id=159)
# Smaller and larger than the table and a window of 4 patches, square and not.
GRIDS = [(1, 4, 4), (1, 6, 10), (3, 2, 6)]


def model(dtype: torch.dtype) -> MuseSpark:
    return muse_spark.build(replace(BOTH, dtype=dtype), "cpu", 0)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pictures(grids: list[tuple[int, int, int]], seed: int = 0) -> Pictures:
    patches = random(sum(t * h * w for t, h, w in grids), VISION.patch_values, seed=seed)
    return Pictures(patches=patches, grids=grids)


def test_the_state_dict_is_the_published_one() -> None:
    """The released shape on the meta device, encoders included: names, shapes and counts."""
    full = muse_spark.configs["full"]
    ours = muse_spark.build(full, "meta", 0).state_dict()
    with torch.device("meta"):
        released = oracle.modeling.MuseSparkForConditionalGeneration(
            oracle.transformers.MuseSparkConfig()
        )
    theirs = released.state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    biases = sum(t.numel() for n, t in ours.items() if n.endswith("e_score_correction_bias"))
    parameters = sum(t.numel() for t in released.parameters())
    assert parameter_count(full) == parameters + biases
    assert biases == 62 * 256  # buffers there and here, counted as parameters by us
    audio = sum(t.numel() for t in released.model.audio_tower.parameters())
    assert round(audio / 1e6) == 118


@DTYPES
def test_patch_embedding_and_resampled_positions_are_bit_equal(dtype: torch.dtype) -> None:
    ours = model(dtype)
    theirs = oracle.published(ours).model.vision_tower.patch_embedder
    seen = pictures(GRIDS)
    patches = seen.patches.to(dtype)
    got = ours.model.vision_tower.patch_embedder(patches, seen.grids)
    assert torch.equal(got, theirs(patches, torch.tensor(seen.grids)))


def published_attention(ours: MuseSpark) -> MuseSpark:
    """A copy whose vision attention rounds its interior as the published one's does."""
    other = copy.deepcopy(ours)
    for layer in other.model.vision_tower.layers:
        layer.attn.attend = PublishedAttend(layer.attn.attend.scale)
    return other


def seen_by_published(ours: MuseSpark, seen: Pictures) -> Tensor:
    grids, patches = torch.tensor(seen.grids), seen.patches.to(ours.config.dtype)
    features = oracle.published(ours).model.get_image_features(patches, grids, return_dict=True)
    return torch.cat(features.pooler_output)


def seen_in_other_orders(ours: MuseSpark, seen: Pictures) -> list[Tensor]:
    twins = reorderings(ours, ours.config, ORDERINGS)
    return [undo(twin.model.see(seen), order) for twin, order in twins]


@DTYPES
def test_vision_encoder_and_adapter(dtype: torch.dtype) -> None:
    """Windows and frames of several sizes; in BF16 with attention's interior emulated."""
    ours, seen = model(dtype), pictures(GRIDS)
    other = ours if dtype == torch.float32 else published_attention(ours)
    theirs = seen_by_published(ours, seen)
    assert theirs.shape == (sum(t * h * w for t, h, w in GRIDS) // 4, SMALL.hidden)
    assert_within(theirs, other.model.see(seen), seen_in_other_orders(other, seen))


def test_vision_attention_interior_is_a_difference() -> None:
    """Left out of the emulation, it shows: in each attention by itself beyond noise, and in what
    the whole encoder gives, where later layers magnify the noise, in more elements."""
    ours, seen, calls = model(BF16), pictures(GRIDS), []
    hooks = [
        layer.attn.attend.register_forward_hook(lambda _, args, out: calls.append((args, out)))
        for layer in ours.model.vision_tower.layers
    ]
    plain = ours.model.see(seen)
    for hook in hooks:
        hook.remove()
    assert len(calls) >= len(GRIDS) * VISION.layers
    attend = ours.model.vision_tower.layers[0].attn.attend

    def reordered(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(ORDERINGS):
            keys, dims = permutation(k.shape[1], generator), permutation(q.shape[-1], generator)
            yield attend(q[..., dims], k[:, keys][..., dims], v[:, keys], mask[..., keys])

    for args, out in calls:
        assert not within(PublishedAttend(attend.scale)(*args), out, reordered(*args))
    theirs, emulated = seen_by_published(ours, seen), published_attention(ours).model.see(seen)
    assert distance(theirs, emulated).count < distance(theirs, plain).count


@DTYPES
def test_audio_encoder_is_bit_equal(dtype: torch.dtype) -> None:
    """Two clips, the second one shorter and ending inside a token."""
    ours = model(dtype)
    sound = Sound.of([random(60, seed=1), random(31, seed=2)], AUDIO.samples_per_token)
    assert sound.samples.shape == (2, 60)
    mask = torch.arange(60) < torch.tensor(sound.lengths)[:, None]
    features = oracle.published(ours).model.get_audio_features(sound.samples.to(dtype), mask)
    got = ours.model.hear(sound)
    assert got.shape == (5 + 3, SMALL.hidden)
    assert torch.equal(got, features.pooler_output)


def test_sound_is_heard_causally() -> None:
    """A later sample changes no earlier token."""
    ours, clip = model(torch.float32), random(60)
    changed = clip.clone()
    changed[36] += 1.0  # the first sample of token 3
    one, two = (ours.model.hear(Sound.of([c], 12)) for c in (clip, changed))
    assert torch.equal(one[:3], two[:3])
    assert not torch.equal(one[3], two[3])


def test_what_stands_between_table_entries_by_hand() -> None:
    """Four places over two patches: centres 0.5 and 2.5, halfway. Over eight: -0.25 is outside by
    a quarter, which counts as zero; 0.25 is three quarters of the first and one of the second."""
    embedder = model(torch.float32).model.vision_tower.patch_embedder
    places, weights = embedder.between(torch.arange(2), 2)
    assert places.tolist() == [[0, 1], [2, 3]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    places, weights = embedder.between(torch.arange(2), 8)
    assert places.tolist() == [[0, 0], [0, 1]]
    assert weights.tolist() == [[0.0, 0.75], [0.75, 0.25]]


def test_patches_by_hand() -> None:
    """Values name frame, colour, row and column; patches of 2 x 2 pixels and two frames."""
    digits = [torch.arange(n).float() for n in (3, 3, 4, 8)]
    frames = sum(
        10.0 ** (3 - i) * d.view([-1 if i == j else 1 for j in range(4)])
        for i, d in enumerate(digits)
    )
    patches, grid = patchify(frames, VISION)
    assert grid == (2, 2, 4)
    assert patches.shape == (16, 24)
    place = [24, 25, 34, 35]  # the second row's third column
    want = [f * 1000 + c * 100 + p for f in (0, 1) for c in range(3) for p in place]
    assert patches[4 + 2].tolist() == want
    assert torch.equal(patches[8:, :12], patches[8:, 12:])  # the third frame, repeated


def prompt() -> tuple[Tensor, Media]:
    """Text, an image, a video, sound, text again."""
    images = Pictures.of([random(1, 3, 8, 12, seed=1)], VISION)
    videos = Pictures.of([random(3, 3, 4, 8, seed=2)], VISION)
    sound = Sound.of([random(30, seed=3)], AUDIO.samples_per_token)
    media = Media(images=images, videos=videos, sound=sound)
    needs = placeholders(BOTH, media)
    assert needs == {"image": [6], "video": [4], "audio": [3]}
    ids = [5, *[157] * 6, 9, *[158] * 2, 11, *[158] * 2, *[159] * 3, 21, 22]
    return torch.tensor([ids]), media


def run_published(other: Any, ids: Tensor, media: Media) -> Any:
    dtype = other.lm_head.weight.dtype
    assert media.images and media.videos and media.sound
    held = torch.arange(media.sound.samples.shape[1]) < torch.tensor(media.sound.lengths)[:, None]
    return other.model(
        input_ids=ids,
        pixel_values=media.images.patches.to(dtype),
        image_grid_thw=torch.tensor(media.images.grids),
        pixel_values_videos=media.videos.patches.to(dtype),
        video_grid_thw=torch.tensor(media.videos.grids),
        input_values=media.sound.samples.to(dtype),
        input_values_mask=held,
    )


def test_a_prompt_of_everything_in_fp32() -> None:
    """Against the published model; and fed in two steps, media in the first, it is the same."""
    ours, (ids, media) = model(torch.float32), prompt()
    place = small.positions(1, 0, ids.shape[1])

    def run(m: Any, cut: int) -> Tensor:
        cache = muse_spark.cache(m.config, 1, ids.shape[1], "cpu")
        first = m(ids[:, :cut], place[:, :cut], cache, "all", media)
        return torch.cat((first, m(ids[:, cut:], place[:, cut:], cache, "all")), dim=1)

    twins = reorderings(ours, ours.config, ORDERINGS)
    noise = [run(twin, ids.shape[1] - 1) for twin, _ in twins]
    whole = run(ours, ids.shape[1] - 1)
    other = oracle.published(ours)
    hidden = run_published(other, ids, media).last_hidden_state
    assert_within(ours.soft_cap(other.lm_head(hidden)), whole, noise)
    assert_within(run(ours, ids.shape[1] - 2), whole, noise)


def test_a_prompt_of_everything_in_bf16() -> None:
    """The decoder's input: text and sound bit-equal, pictures as tested above."""
    ours, (ids, media) = model(BF16), prompt()
    other, got = oracle.published(ours), []
    other.model.language_model.forward = lambda **given: got.append(given["inputs_embeds"]) or {}
    run_published(other, ids, media)
    mine = published_attention(ours).model.embed(ids, media)
    pictured = (ids == 157) | (ids == 158)
    assert torch.equal(got[0][~pictured], mine[~pictured])
    assert_within(
        got[0][pictured],
        mine[pictured],
        [
            undo(twin.model.embed(ids, media), order)[pictured]
            for twin, order in reorderings(published_attention(ours), ours.config, ORDERINGS)
        ],
    )


def test_mini_takes_every_kind_of_input() -> None:
    c = muse_spark.configs["mini"]
    assert c.vision is not None and c.audio is not None
    media = Media(
        images=Pictures.of([random(1, 3, 16, 24)], c.vision),
        videos=Pictures.of([random(4, 3, 8, 8)], c.vision),
        sound=Sound.of([random(100)], c.audio.samples_per_token),
    )
    needs = placeholders(c, media)
    assert needs == {"image": [6], "video": [2], "audio": [4]}
    ids = [1, *[c.image_id] * 6, 2, *[c.video_id] * 2, *[c.audio_id] * 4, 3]
    ids, built = torch.tensor([ids]), muse_spark.build(c, "cpu", 0)
    cache = muse_spark.cache(c, 1, ids.shape[1], "cpu")
    logits = built(ids, small.positions(1, 0, ids.shape[1]), cache, media=media)
    assert logits.shape == (1, 1, c.vocabulary)
    assert logits.isfinite().all()
    silent = replace(media, sound=Sound.of([torch.zeros(100)], c.audio.samples_per_token))
    other = built(ids, small.positions(1, 0, ids.shape[1]), cache, media=silent)
    assert not torch.equal(logits, other)


def say(run: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        run()
    return str(error.value)


def test_what_does_not_fit_is_refused() -> None:
    ours, (ids, media) = model(BF16), prompt()
    assert say(lambda: ours.model.embed(ids[:, 2:], media)) == (
        "the prompt has 5 image placeholders (token 157), the encoder made 6 tokens; "
        "put one placeholder for each"
    )
    assert "7 x 12 pixels; resize them to multiples of 4" in say(
        lambda: patchify(random(1, 3, 7, 12), VISION)
    )
    sound = Sound(samples=random(1, 13), lengths=[13])
    assert "13 samples; pad them with zeros to a multiple of 12" in say(
        lambda: ours.model.hear(sound)
    )
    blind = toy.build(BF16)
    assert "no vision encoder" in say(lambda: blind.model.embed(ids, Media(images=media.images)))
    assert "no audio encoder" in say(lambda: blind.model.embed(ids, Media(sound=media.sound)))
