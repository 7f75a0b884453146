"""Train a layer for the demo model that says the token after the next one: `python assets/train_mtp_layer.py --out FOLDER`.

The result is a copy of assets/demo-model with that layer in it, as publishers ship it (multi-token prediction, DeepSeek-V3
section 2.2), for `--draft mtp` and for `vismoe eval drafts --setups mtp --mtp-model FOLDER`. It takes about ten minutes on one
core. The model itself stays as it is: its hidden states over conversations with true answers are computed first, and the layer,
transformers' own, learns from them the second token ahead; further ones it guesses from what it has said, untrained.
"""

import argparse
import json
import shutil
from pathlib import Path

from vismoe.eval.questions import KINDS, conversation  # first: it lets transformers import a torchvision for another torch
from vismoe.eval.scenes import compose

# isort: split
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoProcessor, Qwen3VLMoeForConditionalGeneration
from transformers.modeling_layers import MtpModel

DEMO = Path(__file__).parent / "demo-model"
BATCH, LR, WARM_UP = 24, 2e-3, 50
Sample = tuple[Tensor, Tensor, int]  # hidden states float32 [S, H], ids [S], the first token of the answer


@torch.no_grad()
def samples(model: Qwen3VLMoeForConditionalGeneration, count: int) -> list[Sample]:
    """Of conversations of all kinds about scenes of the training split."""
    processor, found = AutoProcessor.from_pretrained(DEMO), []
    kept: list[Tensor] = []
    model.model.register_forward_hook(lambda module, given, out: kept.append(out.last_hidden_state[0].float()))
    for number in tqdm(range(count), "Reading", unit="talk"):
        kind = "describe" if number % 2 else KINDS[number // 2 % len(KINDS)]
        talk = conversation(kind, "train", 40_000_000 + number)
        asked = talk.messages(compose)
        text = processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        images = [part["image"] for said in asked for part in said["content"] if part["type"] == "image"]
        prompt = processor(text=text, images=images or None, return_tensors="pt")
        answer = processor.tokenizer(talk.turns[-1].answer + "<|im_end|>", return_tensors="pt").input_ids
        ids = torch.cat([prompt["input_ids"], answer], dim=1)
        more = {name: prompt[name] for name in ("pixel_values", "image_grid_thw") if name in prompt}
        kinds = F.pad(prompt["mm_token_type_ids"], (0, answer.shape[1])) if "mm_token_type_ids" in prompt else None
        model(input_ids=ids, **more, **({} if kinds is None else {"mm_token_type_ids": kinds}), logits_to_keep=1)
        found.append((kept.pop(), ids[0], prompt["input_ids"].shape[1]))
    return found


def guessed(mtp: MtpModel, batch: list[Sample]) -> tuple[Tensor, Tensor]:
    """(logits, the tokens that are right) of every token of the answers but the first, which the layer never guesses."""
    longest = max(len(ids) for _, ids, _ in batch) - 1
    hidden = torch.stack([F.pad(states[:-1], (0, 0, 0, longest + 1 - len(ids))) for states, ids, _ in batch])
    behind = torch.stack([F.pad(ids[1:], (0, longest + 1 - len(ids))) for _, ids, _ in batch])
    positions = torch.arange(1, longest + 1)[None].expand(len(batch), -1)
    out = mtp.forward_layer(0, hidden, positions, None, input_ids=behind)
    rows = [(row, place) for row, (_, ids, first) in enumerate(batch) for place in range(first - 1, len(ids) - 2)]
    where, place = (torch.tensor(numbers) for numbers in zip(*rows, strict=True))
    return mtp._project_to_logits(out[where, place]), behind[where, place + 1]


def train(mtp: MtpModel, talks: list[Sample], steps: int) -> None:
    torch.manual_seed(0)
    weights = list(mtp.layers.parameters())
    optimizer = torch.optim.AdamW(weights, lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    right = 0.0
    for step in (bar := tqdm(range(steps), "Training", unit="step")):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        batch = [talks[int(number)] for number in torch.randint(len(talks), (BATCH,))]
        logits, wanted = guessed(mtp, batch)
        loss = F.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        right += 0.02 * ((logits.argmax(-1) == wanted).float().mean().item() - right)
        bar.set_postfix(loss=f"{loss.item():.3f}", right=f"{right:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the model with its layer")
    parser.add_argument("--talks", type=int, default=3000, metavar="N", help="conversations to learn from (default: 3000)")
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="(default: 1500)")
    chosen = parser.parse_args()
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32)
    talks = samples(model, chosen.talks)
    model.requires_grad_(False)
    model.config.text_config.num_mtp_layers = 1
    torch.manual_seed(0)
    mtp = MtpModel(model, 1)
    for parameter in mtp.layers.parameters():
        parameter.requires_grad_(True)
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, 0.02)
    train(mtp, talks, chosen.steps)
    shutil.copytree(DEMO, chosen.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("vismoe-*"))
    trained = {f"mtp.layers.{name}".replace(".mtp_block.", "."): tensor for name, tensor in mtp.layers.state_dict().items()}
    weights = load_file(DEMO / "model.safetensors") | {name: tensor.bfloat16() for name, tensor in trained.items()}
    save_file(weights, chosen.out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((DEMO / "config.json").read_text())
    config["text_config"]["num_mtp_layers"] = 1
    (chosen.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
