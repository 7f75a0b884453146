"""Which patches of each image were kept: kept ones bright, dropped ones grey and dim. HTML with embedded pictures."""

import base64
import io
from typing import Any

from PIL import Image

from vismoe.vision.overlay import kept_map

SIDE_PIXELS = 512  # the longer side of a shown picture, so that patches of small images have crisp edges and photos stay small
NO_IMAGE = '<p class="vm-note">No image in this conversation yet.</p>'


def seen_pictures(figures: Any) -> str:
    """HTML of a finished request's images; `figures` are its `Figures`."""
    if not figures.pictures:
        return NO_IMAGE
    if len(figures.kept) != len(figures.pictures):
        words = f"all {figures.visual_tokens} visual tokens were kept in every layer"
        shown = [_figure(_sized(picture), "the image, nothing dropped") for picture in figures.pictures]
    else:
        words = f"{figures.kept_visual_tokens} of {figures.visual_tokens} visual tokens were kept; dimmed patches were dropped"
        shown = [_kept(picture, image) for picture, image in zip(figures.pictures, figures.kept, strict=True)]
    return f'<p class="vm-note">{words}.</p><div class="vm-pictures">{"".join(shown)}</div>'


def _kept(picture: Image.Image, image: Any) -> str:
    share = f"{len(image.selection.kept)} of {image.tokens} patches kept"
    if image.layout is not None:  # a picture is also seen as a whole, and rows of patches end with tokens that show nothing
        rows, columns = image.grid
        share = (
            f"{len(image.selection.kept)} of {image.tokens} tokens kept, {len(image.cells)} of them among these {rows * columns}"
        )
    sized = _sized(picture)
    shown = kept_map(sized, image)
    return _figure(sized if shown is None else shown, share)


def _sized(picture: Image.Image) -> Image.Image:
    scale = SIDE_PIXELS / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def _figure(picture: Image.Image, words: str) -> str:
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=88)
    source = base64.b64encode(encoded.getvalue()).decode()
    return f'<figure><img alt="{words}" src="data:image/jpeg;base64,{source}"><figcaption>{words}</figcaption></figure>'
