"""Measures how well a model answers questions about held-out scenes, and how its routers used the experts meanwhile.

Questions go through the processor's chat template, answers are decoded greedily, many at once, and routing is read from the
inputs of the experts modules. `prompts`, `decoded` and `answers` are for studies of any Hugging Face image-text model, paged or
not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vismoe.engine.engine import Engine
from vismoe.engine.generate import Reply
from vismoe.eval.answer_file import Key, questions
from vismoe.eval.asking import answered
from vismoe.eval.questions import FORMS, KINDS, Conversation
from vismoe.eval.scenes import compose
from vismoe.eval.scoring import accuracy, score
from vismoe.models.inputs.images import open_image
from vismoe.options import RequestOptions

if TYPE_CHECKING:
    from vismoe.engine.generate import Figures

MAX_ANSWER_TOKENS = 96
HOT_SHARE = 0.25

Progress = Callable[[int, int], None]  # (questions done, questions in all)


def _routing_row(layer: int, count: Tensor) -> dict[str, Any]:
    share = count.double() / count.sum()
    return {
        "layer": layer,
        "experts_used": int((count > 0).sum()),
        "experts": len(count),
        "busy_experts": int((share > 0.1 / len(share)).sum()),
        "hot_quarter_share": share.sort(descending=True).values[: round(HOT_SHARE * len(share))].sum().item(),
    }


@contextmanager
def routing_counted(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within it, counts the tokens of each expert, by the name of the MoE layer; those of a trial (shared_pass.py) twice."""
    used, hooks = dict[str, Tensor](), []

    def count(name: str, module: Any, arguments: tuple[Any, ...]) -> None:
        index = arguments[1].detach()
        bins = torch.bincount(index.flatten().clamp(max=module.num_experts), minlength=module.num_experts + 1)[
            : module.num_experts
        ]
        used[name] = used.get(name, 0) + bins.cpu()

    for name, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            hooks.append(module.register_forward_pre_hook(lambda module, arguments, name=name: count(name, module, arguments)))
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()


def messages(talk: Conversation) -> list[dict[str, Any]]:
    """The conversation up to its last question in chat form, with its pictures drawn."""
    return talk.messages(compose)


def figures_of(engine: "Engine", asked: list[dict[str, Any]], most_tokens: int, **options: Any) -> "Figures":
    """The figures of one request with these options, once it is answered."""
    reply = engine.chat(asked, max_tokens=most_tokens, **options)
    for _ in reply:
        pass
    return reply.figures


def prompts(processor: Any, talks: Sequence[Conversation]) -> Any:
    """Inputs that ask the last question of each conversation, as one left-padded batch."""
    chats = [messages(talk) for talk in talks]
    text = processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    images = [[part["image"] for said in chat for part in said["content"] if part["type"] == "image"] for chat in chats]
    return processor(text=text, images=images if any(images) else None, padding=True, padding_side="left", return_tensors="pt")


@torch.no_grad()
def decoded(model: Any, processor: Any, inputs: Any, most_tokens: int = MAX_ANSWER_TOKENS) -> list[str]:
    """Greedy answers to a batch of prompts."""
    out = model.generate(**inputs, max_new_tokens=most_tokens, do_sample=False)
    return processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def answers(model: Any, processor: Any, talks: Sequence[Conversation]) -> list[str]:
    """Greedy answers of any model to the last question of each conversation, as one left-padded batch."""
    return decoded(model, processor, prompts(processor, talks).to(model.device))


def ask(engine: Engine, talk: Conversation, draw: int | None = None) -> Reply:
    """Asks the last question of a conversation; `draw`: seed of the selection `random`."""
    prompt = engine.prompts.build(messages(talk), open_image, context=engine.plan.context)
    return engine.answer(prompt, RequestOptions(max_tokens=MAX_ANSWER_TOKENS), draw)


def evaluate(
    engine: Engine,
    seed: int,
    n: int,
    kinds: Sequence[str] = KINDS,
    together: int = 16,
    progress: Progress | None = None,
    world: str = "demo",
) -> dict[str, Any]:
    """Ask n questions of each kind about held-out scenes of one of the WORLDS, so many at once.

    -> {"seed", "n", "world", "kinds": {kind: {"mean", "low", "high", "questions"}}, "routing": [one row per MoE layer],
    "answers": [{"kind", "question", "truth", "answer", "score"}]}. The same seed always gives the same questions.
    """
    unknown = set(kinds) - set(KINDS + FORMS)
    if unknown:
        raise ValueError(f"no such kinds of question: {', '.join(sorted(unknown))}; there are {', '.join(KINDS + FORMS)}")
    talks = {(kind, number): talk for kind in kinds for number, talk in enumerate(questions(kind, range(n), seed, world))}
    rows = dict[Key, dict[str, Any]]()
    with routing_counted(engine.model) as used:
        for key, reply in answered(engine, ((key, partial(ask, engine, talk)) for key, talk in talks.items()), together):
            rows[key] = _row(talks[key], reply.text)
            if progress:
                progress(len(rows), len(talks))
    return {
        "seed": seed,
        "n": n,
        "world": world,
        "kinds": {kind: asdict(accuracy([row["score"] for row in rows.values() if row["kind"] == kind])) for kind in kinds},
        "routing": [_routing_row(layer, count) for layer, count in enumerate(used.values())],
        "answers": [rows[key] for key in talks],
    }


def _row(talk: Conversation, said: str) -> dict[str, Any]:
    last = talk.turns[-1]
    return {"kind": talk.kind, "question": last.question, "truth": last.answer, "answer": said, "score": score(last, said)}
