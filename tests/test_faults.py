"""What goes wrong while a run is under way, each for real where that can be had: memory, disk, signals, numbers."""

import gc
import weakref

import pytest
import torch
from test_rollout import PROMPTS, assert_same_samples, flat

import rollout as rollout_module
from rollout import Rollout, Sampling

# ------------------------------------------------------------------------------------------------ out of memory


def short_of_memory(monkeypatch, limit: int, where: str) -> None:
    """From here on a decode step of more than `limit` rows, or a cache of more slots, raises what CUDA would."""
    real = getattr(rollout_module, where)

    def check(count: int) -> None:
        if count > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def cache(config, slots, *rest):
        check(slots)
        return real(config, slots, *rest)

    def decoder(*arguments, **options):
        made = real(*arguments, **options)
        step = made.step
        made.step = lambda batch: (check(batch), step(batch))
        return made

    monkeypatch.setattr(rollout_module, where, {"KVCache": cache, "Decoder": decoder}[where])


@pytest.mark.parametrize("where", ["Decoder", "KVCache"])
def test_out_of_memory_in_the_rollout_halves_the_slots_says_so_and_samples_the_same(tiny_model, monkeypatch, capsys, where):
    model, sampling = tiny_model(), Sampling(12)
    whole = Rollout(model, max_len=64, slots=16).generate(PROMPTS, 4, sampling, key=(5, 2))
    short = Rollout(model, max_len=64, slots=16)
    short_of_memory(monkeypatch, 5, where)
    found = short.generate(PROMPTS, 4, sampling, key=(5, 2))
    assert_same_samples(flat(whole), flat(found))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"out of memory in the rollout: trying again with {n} sequences at once" for n in (8, 4)]
    assert short.stats["slots"] == 4
    short.generate(PROMPTS, 4, sampling, key=(5, 3))
    assert capsys.readouterr().out == ""  # the lower number stays


def test_a_rollout_that_does_not_fit_at_all_is_one_line_with_a_remedy(tiny_model, monkeypatch):
    rollout = Rollout(tiny_model(), max_len=64, slots=2)
    short_of_memory(monkeypatch, 0, "Decoder")
    with pytest.raises(RuntimeError, match="out of memory with one sequence of max_len=64.*--max-new-tokens") as error:
        rollout.generate(PROMPTS, 2, Sampling(4))
    assert "\n" not in str(error.value)


def test_the_cache_is_really_gone_after_free(tiny_model):
    """On a GPU its memory is the trainer's then: nothing may still hold it."""
    rollout = Rollout(tiny_model(), max_len=64)
    rollout.generate(PROMPTS, 2, Sampling(4))
    cache = weakref.ref(rollout.decoder.cache)
    rollout.free()
    gc.collect()
    assert cache() is None
