"""Visual tokens: how much each matters, which are kept, and a picture of the kept ones. Pure."""
