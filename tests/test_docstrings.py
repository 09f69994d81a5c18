"""First lines of docstrings are sentences with a verb (tier: no process)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.structure import SOURCE, parsed

NOT_FIRST = set("Of What Whether Where Those As From By Who So Such".split())

# Finite forms that first lines have; a new verb is entered here.
VERBS = set(
    """
    are can cannot could did do does had has have is may might must shall should was were will would
    abort accepts accesses accumulates activates adds adopts agree agrees aligns allocates allow
    allows answer answers appends applies apply arrange arranges arrive arrives ask asks assembles
    assigns assumes attach attaches averages avoids became become becomes began begin begins belong
    belongs binds blocks bounds break breaks bring brings broadcasts build builds calculates
    calibrates call calls came carries carry casts cause causes change changes charges check checks
    choose chooses clears clips close closes collect collects combines come comes compare compares
    compiles complete completes composes compresses compute computes concatenates configures
    connects consists contain contains continue continues contracts contribute contributes controls
    convert converts convolves copies copy corresponds cost costs count counts cover covers create
    creates crops cuts damages deals decide decides declares decodes defers defines delays deletes
    delivers depend depends derives describe describes destroys detects determines died dies differ
    differs disagrees discards distributes divides document documents draw draws drops enables
    encodes end ends enforces enlarges enter enters estimates evaluate evaluates exchange exchanges
    executes exist exists exits expands expect expects explain explains exports exposes extends
    extract extracts fail fails fall falls feeds fetches fill fills filters find finds finish
    finishes fit fits flattens flip flips flushes fold folds follow follows forces forgets formats
    forwards freed frees freezes fused gather gathers gave generates get gets give gives go goes got
    grew group grows guard guards handles happen happens hash hashes held help helps hide hides hold
    holds identifies ignores implement implements import imports increases indexes infers inherit
    initialises inserts inspect installs interpolates inverts iterates join joins judges keep keeps
    knew know knows lack lacks lasts launches lay lays lead leads leave leaves left lend lends let
    lets lie lies limits lists load loads locates lock locks log logs look looks loses lost lowers
    made make makes map maps marks masks match matches matter measures meet meets merges mirrors
    mixes modifies moves multiplies name names need needs negates normalise normalises notes
    notifies obtains occupies occurs open opens orders outlive outlives overlap overlaps override
    overrides owns packs pads parallelises parses partitions pass passes pauses performs permutes
    picks place places plans plots points pools post posts precomputes predict predicts prefetches
    prepares present presents prevents print prints produces profiles provides publishes pulls put
    puts queues raise raises ran reach reaches read reads rebuilds recalibrate receive receives
    recognises recomputes records recovers recurs redistributes reduces refer refers refuse refuses
    register registers rejects releases remain remembers removes renames renders reopens reorders
    repeat repeats replaces replicates report reports represent represents requires resamples
    reserves resets reshape reshapes resize resizes resolves respects restarts restores resumes
    return returns reuses reverses rewrites rolls rounds run runs samples save saves saw says scale
    scales scans scatters searches see seeds select selects send sends separates sets settles shards
    share shares shifts shortens shows shrinks shuts simulates skips slices solves sorts speaks
    specifies speeds spends splits spread spreads squeezes stack stacks stand stands start starts
    states stay stays stitches stop stops store stores stretches substitutes succeeds sum summarise
    sums supplies support supports surround surrounds survive survives swaps synchronises take takes
    talks teaches tell tells tests think throws times took touch touches traces track tracks train
    trains transfers transforms translates transposes travel travels tries turn turns undoes unfolds
    unpacks unshuffles unsqueezes update updates upsamples use used uses validates varies verifies
    verify vote votes wait waits walks want wants warms warns watches weighs went wins works wraps
    write writes yields
    """.split()
)

# Nouns too: verbs where they stand first.
VERBS_IF_FIRST = set(
    """
    Add Advances Allocate Channels Cites Compile Denotes Digest Doubles List Measure Models Move
    Note Paints Ranks Record Records Shapes Silences Simulate Studies Wrap
    """.split()
)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line and first paragraph of each; whether it is of a module, a class or a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if words := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), words.split("\n\n")[0], True
            for value, words_below in zip(node.body, node.body[1:], strict=False):
                match value, words_below:
                    case (
                        (ast.Assign() | ast.AnnAssign()),
                        ast.Expr(value=ast.Constant(value=str(words))),
                    ):
                        yield words_below.lineno, words.strip().split("\n\n")[0], False


def offences(text: str) -> list[str]:
    """First lines that begin with one of `NOT_FIRST`, or, but for those of values, have no verb."""
    found = []
    for line, words, needs_verb in docstrings(parsed(text)):
        first = re.split(r"\W", words.lstrip("`*"), maxsplit=1)[0]
        prose = re.sub(r"``.*?``|`.*?`", "", words, flags=re.S).lower()
        has_verb = first in VERBS_IF_FIRST or not VERBS.isdisjoint(re.findall(r"[a-z]+", prose))
        if first in NOT_FIRST or (needs_verb and not has_verb):
            found.append(f"{line}: {words}")
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Offences by file."""
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    return {name: offences(path.read_text()) for name, path in sorted(files.items())}


def test_first_lines_are_sentences(found: dict[str, list[str]]) -> None:
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_offences_are_found() -> None:
    text = '"""The boxes."""\nx = 1\n"""The number."""\ndef f():\n    """Whether it is."""\n'
    assert [line.split(":")[0] for line in offences(text)] == ["1", "4"]
    assert offences('"""It is so."""\n') == []
