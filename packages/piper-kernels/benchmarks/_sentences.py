"""Varied English sentences from a seeded template generator."""

import random

_WORDS = {
    "person": "the surgeon|my neighbour|a retired pilot|the new intern|an old fisherman|our "
    "teacher|the goalkeeper|a street musician|the accountant|her grandmother|two students|nobody",
    "verb": "repaired|painted|forgot|auctioned|photographed|dismantled|borrowed|returned|measured"
    "|described|carried|ignored",
    "thing": "the broken violin|a crate of oranges|three satellite images|the harbour bridge|a "
    "quarterly report|the robot's left gripper|an unusual fossil|the wedding cake|a bug in the "
    "scheduler|the last train ticket|a jar of honey|the constitution",
    "place": "in Lisbon|near the reactor|at the flea market|under heavy snow|behind the library|on "
    "the night shift|two miles offshore|in the laboratory|during half-time|at 30,000 feet",
    "reason": "because the rent was due|so that the crowd would leave|although it was illegal|"
    "while the orchestra was tuning|before the storm arrived|after reading the manual twice|"
    "without telling anyone|in exchange for a small loan",
    "topic": "inflation|protein folding|medieval armour|sourdough|orbital debris|tax law|jazz|"
    "glacier retreat|typography|insulin|chess openings|wheat prices",
    "quality": "surprisingly cheap|badly documented|older than it looks|impossible to clean|"
    "popular with tourists|slower in winter|cited in every paper|dangerous for children",
    "number": "3|17|42.5|1,200|0.08|two dozen|about a million|ninety-nine",
    "unit": "kilograms|volts|pages|light years|euros|milliseconds|passengers|litres",
}
_TEMPLATES = (
    "{person} {verb} {thing} {place} {reason}.",
    "Why is {topic} {quality}?",
    "How many {unit} does {thing} need {place}?",
    "{thing} weighs {number} {unit}, yet {person} {verb} it.",
    "Breaking: {person} {verb} {thing} {reason}!",
    "I read {number} articles about {topic}; most of them are {quality}.",
    "Please compare {topic} with {topic2} in {number} {unit}.",
    "No, {thing} was not {place}, it was {place2}.",
    "{topic} and {topic2} are both {quality}.",
    "{person} said that {thing} is {quality} and then {person2} {verb} {thing2} {place}.",
    "{topic}",
    "def f(x): return x * {number}  # {topic}",
)


def sentences(count: int = 200, seed: int = 0) -> list[str]:
    """Return ``count`` different sentences; the same seed gives the same ones."""
    draw = random.Random(seed)  # noqa: S311  # no secret depends on it
    chosen: list[str] = []
    while len(chosen) < count:
        template = _TEMPLATES[len(chosen) % len(_TEMPLATES)]
        slots = {name: text.split("|") for name, text in _WORDS.items()}
        values = {name: draw.choice(options) for name, options in slots.items()}
        for name in ("person", "thing", "place", "topic"):
            values[f"{name}2"] = draw.choice(slots[name])
        text = template.format(**values)
        if template == "{topic}":  # short queries need a little variety too
            text = f"{text} {draw.choice(slots['place'])}"
        if not text.startswith("def "):
            text = text[0].upper() + text[1:]
        if text not in chosen:
            chosen.append(text)
    return chosen
