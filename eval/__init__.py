"""The demo world (scenes, questions, scoring) and the measurements of quality and speed."""
