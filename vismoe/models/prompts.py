"""From a conversation to model inputs: the family's chat template, its processor, and what it counts as a visual token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import nn
from transformers import AutoTokenizer, BatchFeature, PreTrainedModel, ProcessorMixin

from vismoe.errors import InputError
from vismoe.models.processor import load_processor

VISION_TOWERS = ("visual", "vision_tower", "vision_model")  # what families call the module that encodes images


@dataclass(frozen=True)
class Prompt:
    """One conversation, ready for generate()."""

    inputs: BatchFeature
    tokens: int
    visual_tokens: int
    pictures: tuple[Image.Image, ...]  # upright, in the order of the conversation

    @property
    def images(self) -> int:
        return len(self.pictures)


@dataclass(frozen=True)
class PromptBuilder:
    """`processor` is a processor (images and text) or a tokenizer (text models)."""

    processor: Any
    image_token_id: int | None
    placeholders: tuple[str, ...] = ()  # tokens of the family that stand for images and videos

    @classmethod
    def of(cls, model: PreTrainedModel, name: str, revision: str | None) -> "PromptBuilder":
        hub = {"revision": revision} if revision else {}
        image_token = getattr(model.config, "image_token_id", None)
        loaded = load_processor(name, **hub) if image_token is not None else AutoTokenizer.from_pretrained(name, **hub)
        tokenizer = getattr(loaded, "tokenizer", loaded)
        ids = [getattr(model.config, name, None) for name in ("image_token_id", "video_token_id")]
        return cls(loaded, image_token, tuple(tokenizer.convert_ids_to_tokens(i) for i in ids if i is not None))

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer if isinstance(self.processor, ProcessorMixin) else self.processor

    def vision_towers(self, model: nn.Module) -> Iterator[nn.Module]:
        for path, module in model.named_modules():
            if path.rpartition(".")[2] in VISION_TOWERS:
                yield module
                return

    def build(
        self,
        messages: Sequence[dict[str, Any]],
        open_image: Callable[[Any], Image.Image],
        image_tokens: tuple[int, int] | None = None,
    ) -> Prompt:
        """Inputs for one conversation. Raises InputError for what cannot be answered."""
        images: list[Image.Image] = []
        plain: list[dict[str, Any]] = [
            {"role": _role(message), "content": self._content(message, images, open_image)} for message in messages
        ]
        if not any(m["role"] == "user" for m in plain):
            raise InputError("there is nothing to answer: the conversation has no user message")
        if images and self.image_token_id is None:
            raise InputError(
                "this is a text model, it cannot see images. Fix: ask without --image, or choose a vision-language model"
            )
        if not isinstance(self.processor, ProcessorMixin):
            for message in plain:
                message["content"] = "".join(part["text"] for part in message["content"])
        text = self.processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        options: dict[str, Any] = {"images": images, **self._pixel_limits(image_tokens)} if images else {}
        try:
            inputs = self.processor(text=[text], return_tensors="pt", **options)
        except ValueError as error:  # e.g. an image two hundred times as wide as it is high
            raise InputError(f"the model's processor refuses this input: {error}. Fix: crop or resize the image") from error
        visual = int((inputs["input_ids"] == self.image_token_id).sum()) if self.image_token_id is not None else 0
        return Prompt(inputs, int(inputs["input_ids"].shape[1]), visual, tuple(images))

    def _content(
        self, message: dict[str, Any], images: list[Image.Image], open_image: Callable[[Any], Image.Image]
    ) -> list[dict[str, Any]]:
        """Parts in the template's form; images are opened into `images` in order."""
        content = message.get("content")
        parts = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image" and part.get("image") is not None:
                images.append(open_image(part["image"]))
                parts.append({"type": "image"})
            elif kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": self._without_placeholders(part["text"])})
            else:
                raise InputError(
                    f"a message part of type {kind!r} cannot be used; VisMoE takes {{'type': 'text', 'text': ...}} and "
                    "{'type': 'image', 'image': ...} (no video, no audio)"
                )
        if not parts:
            raise InputError(f"a {message['role']} message has no content")
        return parts

    def _without_placeholders(self, text: str) -> str:
        """User text as it is; what stands for an image in the model's own language may not be typed."""
        for token in self.placeholders:
            if token in text:
                raise InputError(f"the text contains {token}, which stands for an image. Fix: leave it out, and attach the image")
        return text

    def _pixel_limits(self, image_tokens: tuple[int, int] | None) -> dict[str, Any]:
        """Arguments that make the family's image processor give between least and most tokens per image."""
        if image_tokens is None:
            return {}
        images = self.processor.image_processor
        side = getattr(images, "patch_size", 0) * getattr(images, "merge_size", 0)
        if not side:
            raise InputError(f"--image-tokens: the image processor of this family ({type(images).__name__}) has a fixed size")
        least, most = image_tokens
        if not 1 <= least <= most:
            raise InputError(f"image_tokens={image_tokens}: the least number comes first, e.g. 64..1024")
        return {"images_kwargs": {"size": {"shortest_edge": least * side**2, "longest_edge": most * side**2}}}


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant"):
        raise InputError(f"a message needs a role, one of system, user, assistant; got {role!r}")
    return role
