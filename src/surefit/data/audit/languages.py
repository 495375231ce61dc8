"""Which language a text is in: by its letters where no other language has them, else by its most frequent little words.

No model and no download: the passport names what a data set is written in, and says "unknown" where a text has too few
words to tell. docs/audit.md has how often this is right.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import re
from collections import Counter

READ = 1_000
"""Characters of a text that are looked at."""
ENOUGH = 2
"""Little words that a text must have; fewer say nothing."""
UNKNOWN = "unknown"
_LETTERS = (
    ("Japanese", r"[\u3040-\u30ff]"), ("Korean", r"[\uac00-\ud7af]"), ("Chinese", r"[\u3400-\u9fff]"),
    ("Greek", r"[\u0370-\u03ff]"), ("Hebrew", r"[\u0590-\u05ff]"), ("Thai", r"[\u0e00-\u0e7f]"),
    ("Bengali", r"[\u0980-\u09ff]"), ("Tamil", r"[\u0b80-\u0bff]"), ("Georgian", r"[\u10a0-\u10ff]"),
    ("Hindi", r"[\u0900-\u097f]"), ("Arabic", r"[\u0600-\u077f]"), ("Cyrillic", r"[\u0400-\u052f]"),
    ("Latin", r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff]"),
)  # fmt: skip
"""A name and its letters. Japanese is told by its kana, which every sentence has; Hindi stands for its script's others.
"""
_KANA, _HAN = re.compile(_LETTERS[0][1]), re.compile(_LETTERS[2][1])
_COUNTED = [(name, re.compile(letters)) for name, letters in _LETTERS]
_WORD = re.compile(r"[^\W\d_]+")
_WORDS = {
    "Latin": {
        "English": "the of and to in is that for it with as on be are this by from at not or have an was which you if",
        "German": "der die das und ist nicht zu den von mit ein eine auf für sich des im dem werden wird kann als oder",
        "French": "le la les des est et une du pour dans que pas sur par au ne ce avec qui sont ou vous aux cette",
        "Spanish": "el la los las de y en que se un una para por con no del es al como más este su está o ser",
        "Portuguese": "o a os as de e em que não um uma para por com do da no na se ao é dos das foi ou você está",
        "Italian": "il la di che è e un una per non con del della in si sono le i gli al nel come questo alla dei o",
        "Dutch": "de het een van en is niet op te dat voor met zijn in aan als door er wordt kan bij naar om deze dit",
        "Swedish": "och att det som en är inte för med på av den till ett kan har om från eller ska vid du är",
        "Danish": "og at det som en er ikke for med på af den til et kan har om fra eller skal ved du blev hvis kunne",
        "Norwegian": "og å det som en er ikke for med på av den til et kan har om fra eller skal ved du ble hvis kunne",
        "Finnish": "ja on ei se että tai voi ole kun jos oli mutta tämä kuin niin hän joka ovat vain myös käytetään",
        "Polish": "nie i w na z do jest się że to dla jak po lub przez są od tego oraz być można został przy",
        "Czech": "a je se na v že není pro z do jako nebo s by po jsou byl pokud od při tento může lze k",
        "Slovak": "a je sa na v že nie pre z do ako alebo s by po sú bol ak od pri tento môže k zo nemožno",
        "Hungarian": "a az és nem hogy egy is van meg ez vagy ha csak volt már kell de nincs lehet el ki mint",
        "Romanian": "și în de nu la o un este cu pe pentru din care să fi sau a mai au prin ca al ale",
        "Turkish": "ve bir bu için ile da de değil olarak çok daha gibi olan ya veya var yok ne kadar her en",
        "Indonesian": "yang dan di untuk dengan tidak dari ini ke pada adalah itu atau akan dalam bisa telah oleh ada",
        "Vietnamese": "không của và là có được cho một trong với các này để người khi những thể tập đã đó",
        "Catalan": "el la els les de i que no un una per amb és en del s al com aquest està o més ha dels",
    },
    "Cyrillic": {
        "Russian": "и в не на что с по для это как из к или у за от же бы так но его был может",
        "Ukrainian": "і в не на що з для це як до або та від за у є бути якщо цей його але не може й",
        "Bulgarian": "и в не на за се да от е са с по или като това при ще който до има бъде със",
        "Serbian": "и у не на је да се за од са или као ово који при због није су могу",
        "Belarusian": "і ў не на што з для гэта як да або ад за у ці бы калі але можа быць",
    },
    "Arabic": {
        "Arabic": "في من على أن إلى لا هذا التي أو عن مع ما هذه هو كان قد لم ذلك كل",
        "Persian": "در به از که این را با است برای یا آن نیست یک می و تا هم",
        "Urdu": "کے میں ہے کی اور سے کا کو نہیں ہیں یہ پر اس کر نے",
    },
}  # fmt: skip
_OWN = {
    "Russian": "ыэ", "Ukrainian": "їєґ", "Belarusian": "ўыэ", "Serbian": "јљњћђџ", "German": "ß", "Polish": "łśźż",
    "Czech": "řůě", "Slovak": "ľĺŕô", "Hungarian": "őű", "Romanian": "șțş", "Turkish": "ğı", "Vietnamese": "ơưạế",
    "Portuguese": "ãõ", "Spanish": "ñ¿¡", "Persian": "پچگ", "Urdu": "ٹڑے",
}  # fmt: skip
"""Letters that one language, or few, of those with the same script here have; each counts as a little word."""
_LISTS = {
    script: {language: frozenset(words.split()) for language, words in lists.items()}
    for script, lists in _WORDS.items()
}
_SHARED = {
    script: Counter(word for words in lists.values() for word in words) for script, lists in _LISTS.items()
}  # fmt: skip


def language_of(text: str) -> str:
    """The language of a text, in English, or `UNKNOWN`.

    >>> language_of("Die Katze ist nicht auf dem Dach"), language_of("猫は屋根の上にいる"), language_of("x = 3")
    ('German', 'Japanese', 'unknown')
    """
    text = text[:READ]
    name = _letters_of(text)
    return _by_words(text, name) if name in _LISTS else name


def _letters_of(text: str) -> str:
    """Whose letters most are; of a few Latin names in a Japanese sentence, still Japanese."""
    if text.isascii():
        return "Latin"
    if _KANA.search(text) and 20 * len(_KANA.findall(text)) > len(_HAN.findall(text)):
        return "Japanese"
    counts = {name: len(letters.findall(text)) for name, letters in _COUNTED}
    # A Chinese or Korean character is a word or a syllable: it weighs three letters.
    weights = {name: count * (3 if name in ("Chinese", "Korean") else 1) for name, count in counts.items()}
    return max(weights, key=lambda name: weights[name]) if any(weights.values()) else UNKNOWN


def _by_words(text: str, script: str) -> str:
    """The language most of whose little words are there; a word that several have counts for each in part."""
    shared, text = _SHARED[script], text.lower()
    found = Counter(word for word in _WORD.findall(text) if word in shared)
    own = {language: sum(map(text.count, _OWN.get(language, ""))) for language in _LISTS[script]}
    if sum(found.values()) + sum(own.values()) < ENOUGH:
        return UNKNOWN
    scores = {
        language: min(own[language], 3)
        + sum(min(count, 3) / shared[word] for word, count in found.items() if word in words)
        for language, words in _LISTS[script].items()
    }
    first, second = sorted(scores, key=lambda language: -scores[language])[:2]
    return first if scores[first] > scores[second] else UNKNOWN
