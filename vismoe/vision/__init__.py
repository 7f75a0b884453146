"""Visual tokens: which of them matter, which go deeper, and a picture of those that did. Pure."""
