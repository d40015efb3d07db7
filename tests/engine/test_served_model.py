"""The model as the scheduler sees it."""

from __future__ import annotations

import torch
from model_rig import Sequencer, prompt_of, tiny_model

from banyan.engine.messages import Sampling
from banyan.engine.plans import SeqInput
from banyan.engine.presets import build_tokenizer
from banyan.engine.served_model import ServedModel


def _served(seed: int = 0) -> tuple[ServedModel, Sequencer]:
    rig = Sequencer.of(tiny_model("tiny-full"), page_size=16)
    return ServedModel(rig.runner, build_tokenizer(), seed), rig


def test_a_step_of_each_kind() -> None:
    served, rig = _served()
    tables = rig.new_tables()
    rig.prepare(tables, 0, 20)
    logits = served.forward([SeqInput(prompt_of(20), 0, tables)])
    sampling = Sampling(logprobs=2, stop=("zz",))
    (choice,) = served.sample(logits, [served.new_sampler(sampling)])
    assert choice.token == int(logits[0].argmax())
    assert choice.logprob is not None and choice.logprob.top[0][0] == choice.token
    text = served.new_text(sampling, prompt_of(20))
    assert [text.push(t) for t in b"azb"] == ["a", "", "zb"]


def test_requests_without_a_seed_get_theirs_from_the_engines() -> None:
    logits = torch.zeros(1, 1000)

    def drawn(served: ServedModel) -> list[int]:
        samplers = [served.new_sampler(Sampling(temperature=1.0)) for _ in range(6)]
        return [served.sample(logits, [s])[0].token for s in samplers]

    assert len(set(drawn(_served()[0]))) > 1
    assert drawn(_served(1)[0]) == drawn(_served(1)[0])
    assert drawn(_served(1)[0]) != drawn(_served(2)[0])
