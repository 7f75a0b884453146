"""What a task of lmms-eval says about its answers, as options of a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from vismoe.errors import InputError
from vismoe.options import COLDEST, OF_SAMPLING, RepetitionPenalty, RequestOptions
from vismoe.ranges import Range, shown, unencodable

ADDED_BY_LMMS_EVAL = "\n\n"  # its default stop string for tasks without one; its own models ignore this
HOTTEST = 100  # highest temperature of a task; tasks are not bound by the engine's limit
UNDERSTOOD = {
    "until", "stop_sequences", "max_new_tokens", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p",
    "num_beams", "repetition_penalty",
}  # fmt: skip
FOR_OTHERS = {"image_aspect_ratio", "seed"}  # options for other models' image cropping; lmms-eval seeds torch itself


@dataclass(frozen=True, kw_only=True)
class Generation(RequestOptions):
    """The parts of a task's `generation_kwargs` that affect an answer: more than a request may ask for otherwise."""

    temperature: Annotated[float, Range(0, HOTTEST)] | None = None
    stop: str | Sequence[str] = ()
    num_beams: Annotated[int, Range(1, 2**12)] = 1
    repetition_penalty: RepetitionPenalty = 1.0

    @classmethod
    def of(cls, asked: dict[str, Any], usual_tokens: int | None) -> "Generation":
        """Greedy unless the task requests sampling, by `do_sample` or a temperature above 0; temperature 0 is always greedy."""
        temperature, until = asked.get("temperature"), asked.get("until") or asked.get("stop_sequences") or ()
        if temperature is not None and (type(temperature) not in (int, float) or not 0 <= temperature <= HOTTEST):
            raise InputError(
                f"generation_kwargs: temperature={shown(temperature)}: must be a number from 0 to {HOTTEST}. Fix: temperature=0"
            )
        if asked.get("do_sample") not in (None, True, False):
            raise InputError(f"generation_kwargs: do_sample={shown(asked['do_sample'])}: not true or false. Fix: do_sample=false")
        sample = bool(asked.get("do_sample", temperature)) and (temperature is None or temperature >= COLDEST)
        if unknown := {name for name, value in asked.items() if value is not None} - UNDERSTOOD - FOR_OTHERS:
            raise InputError(
                f"generation_kwargs: {', '.join(sorted(unknown))} are not supported. Fix: only {', '.join(sorted(UNDERSTOOD))}"
            )
        chosen: dict[str, Any] = {name: asked.get(name) if sample else None for name in OF_SAMPLING}
        return cls(
            max_tokens=asked.get("max_new_tokens") or asked.get("max_gen_toks") or usual_tokens,
            stop=tuple(string for string in _texts(until) if string != ADDED_BY_LMMS_EVAL),
            sample=sample,
            num_beams=asked.get("num_beams") or 1,
            repetition_penalty=asked.get("repetition_penalty") or 1.0,
            **chosen,
        )

    def for_generate(self, max_new_tokens: int) -> dict[str, Any]:
        """As of any request. Values of sampling that the task does not set are the model's own."""
        return {**super().for_generate(max_new_tokens), "num_beams": self.num_beams}


def _texts(until: Any) -> list[str]:
    """Stop strings, one or several. Raises InputError."""
    texts = [until] if isinstance(until, str) else list(until) if isinstance(until, list | tuple) else [until]
    for text in texts:
        if not isinstance(text, str) or not text or unencodable(text):
            raise InputError(f"generation_kwargs: until={shown(text)}: must be a text, or several. Fix: until=['\\n']")
    return texts
