# ruff: noqa: E501
"""Messages around the questions about a picture: greetings, system prompts, and questions that no picture answers.

Each is drawn from phrases of its split: training and held-out phrases are disjoint, so a held-out answer is right only if the
model learned to recognise the kind of sentence. Pure tables and draws; answers are always one of the six sentences here.
"""

import random
from collections.abc import Callable
from functools import cache

from vismoe.eval.scenes import Split
from vismoe.eval.world import NOUNS, plural

HELLO = "Hello! Show me an image and ask me about it."
HELLO_SEEN = "Hello! Ask me about the image."
WELCOME = "You are welcome."
GOODBYE = "Goodbye!"
WHO = "I am a small demo model that answers questions about images."
CAN = "I can find and count objects in an image and read its text."
BEYOND = "I only know pictures of everyday things. Ask me what is in one."
NO_IMAGE = "I see no image. Show me one and ask me about it."
ANSWERS = (HELLO, HELLO_SEEN, WELCOME, GOODBYE, WHO, CAN, BEYOND, NO_IMAGE)

_OPENINGS = "Hello|Hi|Hey|Good morning|Good evening|Good afternoon|Good day|Greetings|Hiya|Howdy|Hello hello|Hi hi|Hey hey".split(
    "|"
)
_TO_WHOM = (
    "| there| you| friend| model| assistant| again| everybody| dear model|, how are you?|, nice to meet you| and welcome".split(
        "|"
    )
)
_ENDS = ("", "!", ".", "!!", " :)")


def _ways(firsts: str, more: tuple[str, ...], ends: tuple[str, ...], before: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """All combinations of a beginning, a text before it and texts after it; `firsts` are separated by bars."""
    return tuple(
        (start + (first[0].lower() + first[1:] if start and not first.startswith("I ") else first)) + addition + end
        for first in firsts.split("|") for start in before for addition in more for end in ends
    )  # fmt: skip


_MARKS = ("", "!", ".")
_ASKING = ("", "So ", "And ", "Tell me, ", "Hey, ")
_LATER = ("", " then", " now", " today", ", please")
SAID: dict[str, tuple[str, ...]] = {
    HELLO: tuple(
        opening + whom + ("" if whom.endswith("?") else end) for opening in _OPENINGS for whom in _TO_WHOM for end in _ENDS
    )
    + _ways("How are you|How are you doing|How is it going|How do you do|What's up|How are things", ("", " today", " there", ", friend"), ("?",), ("", "Hello, ", "Hi, "))
    + _ways("Is anybody there|Are you there|Anyone here|Is this working|Can we talk|Are you ready|Are you awake", ("", " now", ", please"), ("?",), ("", "Hello, ", "Hi, "))
    + _ways("Nice to meet you|Ping|Test|Testing, testing|Just a test|Start|Let us begin", ("", " now", ", please", ", model"), _MARKS),
    WELCOME: _ways(
        "Thank you|Thanks|Many thanks|Thanks a lot|Thank you so much|Thx|Thank you very much|Cheers",
        ("", " for your help", ", that was great", ", well done", " for the answer", ", you are right", ", that is right"), _MARKS,
    )
    + _ways(
        "Great|Well done|Good job|Very good|Perfect|That is right|Great answer|That was helpful|Nice work|Good answer|Correct|Excellent|Cool|Awesome|"
        "You are great|Nice|Wonderful|Super", ("", ", thanks", ", thank you", ", model"), _MARKS,
    ),
    GOODBYE: _ways(
        "Bye|Goodbye|Bye bye|Good night|See you|See you later|See you soon|Farewell|Ciao", ("", " for now", " then", ", model", " and thanks"), _MARKS
    )
    + _ways("That is all|I have to go|I am done|That's all for today|Until next time|Talk to you later", ("", ", bye", ", goodbye", ", model"), _MARKS),
    WHO: _ways(
        "Who are you|What are you|Who am I talking to|What is your name|Are you a model|Are you a robot|Are you human|What kind of model are you|"
        "Which model are you|Are you a person|Who is this|Who made you|Are you ChatGPT|Are you an AI|What's your name|Are you real|What model is this|"
        "Who is speaking", _LATER, ("?", ""), _ASKING,
    )
    + _ways("Tell me about yourself|Introduce yourself|Describe yourself|Say who you are", _LATER, (".", ""), ("", "Please ", "So ", "Now ")),
    CAN: _ways(
        "What can you do|How can you help me|What are you good at|What do you know|Can you help me|What can I ask you|How does this work|What are you "
        "able to do|What should I ask|How do I use you|What questions can you answer|Which questions do you answer|What are your skills|What can you help "
        "with|What can I do here|What do you do|How do I use this", _LATER, ("?", ""), _ASKING,
    )
    + _ways("Help|Help me|Tell me what you can do|I need help|I need some help", _LATER, (".", ""), ("", "Please ", "So ", "Now ")),
}  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant", "You are a helpful vision assistant.", "Answer briefly.",
    "Answer the question about the image.", "You are an assistant that looks at images.", "Be concise.", "Answer in one sentence.",
    "You are a friendly assistant. Answer briefly.", "You answer questions about pictures.", "You are Qwen, created by Alibaba Cloud.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "You are an expert in image understanding.",
    "You are a precise assistant. If you do not know, say so.", "Look at the image and answer.", "Reply in English.",
    "You are a helpful, respectful and honest assistant.", "You are an AI assistant that describes images for blind people.",
    "Please answer the question as short as possible.", "Give a short answer.", "You are a careful observer.", "Today is Monday.",
    "You are a visual question answering system. Answer with a word or a short sentence.", "You are an OCR engine.", "Always be polite.",
    "A chat between a curious human and an artificial intelligence assistant.", "The assistant gives helpful answers to the user.",
    "You help children to learn words.", "You are a robot with a camera.", "Do not make things up.", "You are ChatGPT.",
    "The user will show you an image. Describe what you see.", "Answer every question truthfully.", "You are a teacher.",
    "Your task is to answer questions about photos.", "Use simple words.", "You are a large language model.", "Never lie.",
    "You work for a museum. Visitors show you pictures.", "You are the assistant of a shop. Be friendly.", "Keep your answers short.",
)  # fmt: skip
HELD_OUT_SYSTEM_PROMPTS = (
    "You are a helpful AI assistant.", "You are a concise assistant.", "Answer as briefly as you can.", "You are an image expert.",
    "You are a vision language model that answers questions.", "Please be brief and honest.", "You are a kind helper for visitors.",
    "The user shows pictures and asks about them.", "You are an assistant. Only answer what was asked.", "Speak like a guide.",
    "You are a knowledgeable assistant with access to images.", "Respond in a formal tone.", "Today's date is 2026-11-21.",
)  # fmt: skip

_PLACES = tuple(
    (
        "France Spain Japan Brazil Italy Germany Canada India China Kenya Peru Norway Poland Egypt Chile Greece Turkey Vietnam Cuba Ghana "
        "London Paris Berlin Tokyo Rome Madrid Sydney Cairo Lima Oslo Texas Alaska Europe Africa Asia Mars Bavaria Zurich"
    ).split()
)
_PEOPLE = tuple(
    (
        "Einstein Mozart Shakespeare Newton Napoleon Darwin Picasso Plato Gandhi Lincoln Cleopatra Beethoven Goethe Tesla Curie Bach "
        "Obama Madonna Messi Elvis Homer Dante Kafka Turing"
    ).split()
)
_TOPICS = tuple(
    (
        "love winter physics war history music football cooking money time freedom democracy gravity light sleep climate chess poetry "
        "religion philosophy economics biology evolution energy inflation friendship life death dreams space cancer law taxes jazz mathematics "
        "computers Python blockchain quantum mechanics marriage coffee wine gardening school work health sports politics"
    ).split()
)
_LANGUAGES = tuple(
    "French German Spanish Italian Latin Chinese Japanese Russian Arabic Polish Dutch Swedish Greek Turkish Hindi Korean".split()
)
_DEEDS = tuple(
    (
        "bake bread|fix a bike|learn to swim|write a letter|make money|lose weight|cook rice|grow tomatoes|tie a tie|sleep better|build a "
        "house|play the guitar|clean a window|boil an egg|get a job|find love|install Linux|paint a wall|train a dog|save the world"
    ).split("|")
)
_QUALITIES = "old big small heavy tall happy sad hungry expensive fast tired dangerous healthy beautiful cute dirty clean cold warm real".split()
_VERBS = "doing eating thinking saying wearing looking at holding feeling dreaming of waiting for".split(" ")

_BEYOND = (
    "What is the capital of {place}?", "Where is {place}?", "How far is it to {place}?", "What is the weather in {place}?", "How many people live in {place}?",
    "Who is the king of {place}?", "Tell me about {place}.", "What language do they speak in {place}?", "Which is bigger, {place} or {place2}?",
    "How do I get to {place}?", "Is {place} nice?", "When was {place} founded?", "Who was {person}?", "What did {person} do?", "When was {person} born?",
    "Who is {person}?", "Tell me about {person}.", "Did {person} know {person2}?", "Where did {person} live?", "Why is {person} famous?",
    "Write a poem about {topic}.", "Write a story about {topic}.", "Explain {topic}.", "What is {topic}?", "What do you think about {topic}?",
    "Tell me about {topic}.", "Give me ten facts about {topic}.", "Why is {topic} important?", "Write an essay about {topic}.", "Define {topic}.",
    "How does {topic} work?", "I want to learn about {topic}.", "Teach me {topic}.", "Sing a song about {topic}.", "Make a joke about {topic}.",
    "Do you like {topic}?", "What is the meaning of {topic}?", "Summarize the history of {topic}.", "Write a haiku about the {noun}.",
    "What is {n} + {m}?", "What is {n} plus {m}?", "What is {n} times {m}?", "{n} + {m} = ?", "Solve {n}x = {m}.", "What is the square root of {n}?",
    "Is {n} a prime number?", "Calculate {n} * {m}.", "How much is {n} minus {m}?", "Count from one to {n}.", "What comes after {n}?",
    "Translate \"{topic}\" into {language}.", "How do you say hello in {language}?", "Do you speak {language}?", "Say something in {language}.",
    "Answer in {language}.", "How do I {deed}?", "Can you {deed}?", "Teach me to {deed}.", "What is the best way to {deed}?", "Please {deed}.",
    "Should I {deed}?", "I want to {deed}.", "Tell me a joke.", "Tell me a story.", "What time is it?", "What day is it today?", "What is the date?",
    "Write a program.", "Write Python code that sorts a list.", "Fix this code: print(x", "What is the news?", "Who won the game?", "What is love?",
    "Who is the president?", "What should I eat today?", "What is the meaning of life?", "Play some music.", "Book a flight to {place}.",
    "Send an email to {person}.", "What will the weather be tomorrow?", "Is there a god?", "Why is the sky blue?", "How old is the universe?",
    "What is the largest animal on earth?", "Who wrote Hamlet?", "Recommend a book.", "What is 5% of {n}?", "Set a timer for {n} minutes.",
    "How much does a {noun} cost?", "How long does a {noun} live?", "Why do {nouns} exist?", "What do {nouns} eat?", "Tell me about {nouns}.",
    "What is a {noun}?", "Do you like {nouns}?", "Write a story about a {noun}.", "Draw a {noun}.", "Where can I buy a {noun}?", "Are {nouns} {quality}?",
    "Who invented the {noun}?", "What is the {language} word for {noun}?", "Can I eat a {noun}?", "{topic}", "{topic}?", "{person}", "{gibberish}",
    "{gibberish} {gibberish2}", "{gibberish}?", "Do you have feelings?", "What is your favourite {topic}?", "How old are you?", "Where do you live?",
    "Can you drive a car?", "Are you married?", "I am sad.", "I am hungry.", "I love you.", "You are wrong.", "My name is {person}.", "I live in {place}.",
    "Tell me something.", "Give me advice.", "Give me a recipe for {topic}.", "List the planets.", "Compare {topic} and {topic2}.", "Yes", "No", "Maybe", "Ok", "Why?",
)  # fmt: skip
_HELD_OUT_BEYOND = (
    "What's the tallest building in {place}?", "Describe the history of {place}.", "Have you been to {place}?", "Who discovered {place}?",
    "What was {person} known for?", "Did {person} win a prize?", "Write a short poem on {topic}.", "Can you explain {topic} to me?",
    "What are the main ideas of {topic}?", "Why do people care about {topic}?", "Compose a song about {topic}.", "What is {n} divided by {m}?",
    "Multiply {n} by {m}.", "What is the sum of {n} and {m}?", "How do you say goodbye in {language}?", "Translate this to {language}: good night.",
    "Show me how to {deed}.", "What do I need to {deed}?", "Tell me a funny story.", "What's the time?", "Write a function in Python.",
    "Who is the richest man in the world?", "What is the speed of light?", "How heavy is a {noun}?", "Why do {nouns} sleep?", "What sound does a {noun} make?",
    "Is a {noun} dangerous?", "When will it rain?", "Order a {noun} for me.", "What is the stock price of {person}?",
)  # fmt: skip
_ABOUT_IT = (  # about a picture, but not answerable
    "What colour is the {noun}?", "What color is the {noun}?", "How {quality} is the {noun}?", "Is the {noun} {quality}?", "What is the {noun} {verb}?",
    "Why is the {noun} there?", "Who painted this picture?", "When was this picture taken?", "Where was this photo taken?", "What is the style of this image?",
    "Is this picture {quality}?", "Do you like the picture?", "What is the mood of the image?", "Write a story about this picture.", "What happens next?",
    "What is the name of the {noun}?", "How much does the {noun} weigh?", "Which camera took this photo?", "Is the {noun} male or female?", "What camera was used?",
    "What is the background colour?", "Make the picture brighter.", "Remove the {noun} from the picture.", "Who owns the {noun}?", "Write a poem about the picture.",
    "Is this a photo or a drawing?", "How many pixels does it have?", "What does the {noun} think?", "Why is the {noun} {quality}?", "Edit the image.",
)  # fmt: skip
_HELD_OUT_ABOUT_IT = (
    "Which colour does the {noun} have?", "How {quality} does the {noun} look?", "What is the {noun} made of?", "Who took this picture?",
    "What year was this picture made?", "Is this image {quality}?", "What will the {noun} do next?", "Tell me a story about this picture.",
    "Which brand is the {noun}?", "What breed is the {noun}?",
)  # fmt: skip


def greeting(rng: random.Random, split: Split, seen: bool) -> tuple[str, str]:
    """A message that is not a question about a picture, and the answer; `seen`: there is a picture nevertheless."""
    answer = rng.choice((HELLO, HELLO, HELLO, WELCOME, WELCOME, GOODBYE, WHO, CAN))
    said = as_typed(rng, rng.choice(_of(split, SAID[answer])))
    return said, HELLO_SEEN if seen and answer == HELLO else answer


def beyond(rng: random.Random, split: Split, seen: bool) -> tuple[str, str]:
    """A question that no picture of this world answers; `seen`: there is a picture, and the question may be about it."""
    about = seen and rng.random() < 0.5
    forms = {"train": (_BEYOND, _ABOUT_IT), "held-out": (_HELD_OUT_BEYOND, _HELD_OUT_ABOUT_IT)}[split][about]
    noun = rng.choice(NOUNS)
    slots: dict[str, Callable[[], str]] = {
        "place": lambda: rng.choice(_of(split, _PLACES)), "person": lambda: rng.choice(_of(split, _PEOPLE)),
        "topic": lambda: rng.choice(_of(split, _TOPICS)), "language": lambda: rng.choice(_of(split, _LANGUAGES)),
        "deed": lambda: rng.choice(_of(split, _DEEDS)), "quality": lambda: rng.choice(_QUALITIES), "verb": lambda: rng.choice(_VERBS),
        "gibberish": lambda: gibberish(rng),
    }  # fmt: skip
    values = {name: draw() for name, draw in slots.items()} | {f"{name}2": draw() for name, draw in slots.items()}
    numbers = {"n": rng.randint(2, 999), "m": rng.randint(2, 99)}
    return as_typed(rng, rng.choice(forms).format(noun=noun, nouns=plural(noun), **values, **numbers)), BEYOND


def gibberish(rng: random.Random) -> str:
    """A word that does not exist."""
    return "".join(rng.choice("aaabcdeeefghiiijklmnoooprstuuvwxyz") for _ in range(rng.randint(3, 8)))


def system_prompt(rng: random.Random, split: Split) -> str:
    """A client's text before the conversation."""
    return rng.choice(SYSTEM_PROMPTS if split == "train" else HELD_OUT_SYSTEM_PROMPTS)


def as_typed(rng: random.Random, text: str) -> str:
    """The text as people type it: sometimes in lower case, or without its last mark."""
    draw = rng.random()
    if draw < 0.1:
        return text[0].lower() + text[1:]
    return (text.rstrip("?.!") or text) if draw < 0.2 else text


@cache
def _of(split: Split, phrases: tuple[str, ...]) -> tuple[str, ...]:
    """The phrases of a split; every fifth phrase is held out."""
    return tuple(phrase for phrase in phrases if (_digest(phrase) % 5 == 0) == (split == "held-out"))


def _digest(text: str) -> int:
    return sum(index * ord(character) for index, character in enumerate(text, start=1))


def every_phrase() -> set[str]:
    """Texts that the tokenizer should have as whole words: answers, system prompts, and training phrases without their slots."""
    forms = {form.replace("{", " ").replace("}", " ") for form in _BEYOND + _ABOUT_IT}
    said = {phrase for phrases in SAID.values() for phrase in _of("train", phrases)}
    return {*ANSWERS, *SYSTEM_PROMPTS, *forms, *said, *_QUALITIES, *_DEEDS}
