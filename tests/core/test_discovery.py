"""Discovery with real metadata: distributions written as `.dist-info` folders on `sys.path`."""

from __future__ import annotations

import importlib.metadata
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jackfield
from jackfield.errors import SelectionError
from jackfield.registry.backends import PluginRecord
from jackfield.spelling import parse

if TYPE_CHECKING:
    from conftest import Site


def test_a_good_plugin_is_recorded(site: Site) -> None:
    site.add("My_Kernels", site.attention("mine"), version="2.1rc1")
    found = site.look()
    assert site.record(found, "My_Kernels") == PluginRecord(
        "My_Kernels-ep",
        "outside_my_kernels",
        "My_Kernels",
        "2.1rc1",
        "loaded",
        backends=("attention:mine",),
    )
    registered = found.find("attention", parse("mine"))
    assert (registered.distribution, registered.version) == ("My_Kernels", "2.1rc1")
    assert found.warnings == []
    site.assert_built_ins_work(found)


def test_a_distribution_is_named_as_pip_names_it(site: Site) -> None:
    site.add("My_Kernels", site.attention("mine"))
    found = site.look()
    for spelling in ("My_Kernels", "my-kernels", "MY.kernels"):
        assert found.find("attention", parse(f"{spelling}/mine")).name == "mine"


@pytest.mark.parametrize("where", ["import", "hook"])
def test_a_plugin_that_hangs_is_not_waited_for(
    site: Site, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(threading, "release_outside_plugin", release, raising=False)
    hang = "import threading; threading.release_outside_plugin.wait(60)"
    hook = site.attention("bad")
    site.add("bad", hang if where == "import" else hook.replace("return [", f"{hang}; return ["))
    site.add("good", site.attention("good"))
    try:
        found = site.look(JACKFIELD_LOAD_TIMEOUT="0.5")
    finally:
        release.set()
    bad = site.record(found, "bad")
    assert bad.state == "failed"
    assert str(bad.cause).startswith("loading outside_bad did not end within 0.5 s; delete /")
    assert site.record(found, "good").state == "loaded"
    site.assert_built_ins_work(found)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", ""])
def test_a_senseless_timeout_is_a_warning(site: Site, text: str) -> None:
    found = site.look(JACKFIELD_LOAD_TIMEOUT=text)
    (warning,) = found.warnings
    assert "JACKFIELD_LOAD_TIMEOUT" in warning
    assert repr(text) in warning
    site.assert_built_ins_work(found)


def test_an_endless_timeout_is_one(site: Site) -> None:
    found = site.look(JACKFIELD_LOAD_TIMEOUT="inf")
    assert found.warnings == []
    site.assert_built_ins_work(found)


def test_a_plugin_for_another_jackfield_is_not_imported(site: Site, tmp_path: Path) -> None:
    trace = tmp_path / "imported"
    side_effect = f"open({str(trace)!r}, 'w').close()\n"
    site.add("newer", side_effect + site.attention("newer"), requires=("torch", "Jackfield >=99"))
    site.add("older", side_effect + site.attention("older"), requires=("jackfield (<0.0.1)",))
    found = site.look()
    ours = importlib.metadata.version("jackfield")
    for name, wanted in (("newer", ">=99"), ("older", "<0.0.1")):
        assert site.record(found, name).state == "failed"
        assert site.record(found, name).cause == (
            f"needs jackfield{wanted}, this is jackfield {ours}: upgrade one of the two"
        )
    assert not trace.exists()
    site.assert_built_ins_work(found)


@pytest.mark.parametrize(
    "requirement",
    [
        "jackfield>=0.0.1",
        "jackfield",
        "jackfield-extras>=99",
        "jackfieldlike>=99",
        "jackfield>=99; extra == 'next'",
        "jackfield>=99; python_version < '3'",
        "another>=99",
    ],
)
def test_a_requirement_that_holds_or_does_not_count(site: Site, requirement: str) -> None:
    site.add("good", site.attention("good"), requires=(requirement,))
    assert site.record(site.look(), "good").state == "loaded"


def test_a_requirement_that_cannot_be_read(site: Site) -> None:
    site.add("bad", site.attention("bad"), requires=("jackfield >>> 1",))
    found = site.look()
    assert (site.record(found, "bad").cause or "").startswith(
        "its requirement 'jackfield >>> 1' cannot"
    )
    site.assert_built_ins_work(found)


@pytest.mark.parametrize("value", ["outside_gone", "outside_gone.inner", "outside_good.inner"])
def test_stale_metadata(site: Site, value: str) -> None:
    site.add("good", site.attention("good"))
    site.add("stale", "", entry_points={"gone": value}, module="outside_elsewhere")
    cause = site.record(site.look(), "stale").cause or ""
    assert value in cause
    assert "reinstall stale" in cause


def test_metadata_without_a_name(site: Site) -> None:
    (site.add("ghost", site.attention("ghost")) / "METADATA").unlink()
    found = site.look()
    ghost = site.record(found, "unknown")
    assert (ghost.entry_point, ghost.module, ghost.state) == ("ghost-ep", "outside_ghost", "failed")
    assert str(site.folder) in (ghost.cause or "")
    assert "reinstall" in (ghost.cause or "")
    site.assert_built_ins_work(found)


def test_a_strangers_malformed_entry_points_hide_nobody(site: Site) -> None:
    site.add("good", site.attention("good"))
    info = site.add("stranger", "")
    (info / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    found = site.look()
    assert site.record(found, "good").state == "loaded"
    (warning,) = found.warnings
    assert "stranger-1.5.dist-info cannot be read, reinstall it" in warning
    site.assert_built_ins_work(found)


def test_one_distribution_twice_on_the_path(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first on the path counts, as for import."""
    other = site.beside("other")
    other.add("twice", site.attention("new"), version="2.0")
    site.add("twice", site.attention("old"), version="1.0")
    monkeypatch.syspath_prepend(other.folder)
    assert site.record(site.look(), "twice").version == "2.0"
    (site.add("stranger", "") / "entry_points.txt").write_text("[x]\nno equals sign\n")
    assert site.record(site.look(), "twice").version == "2.0"


def test_two_strangers_claim_one_name(site: Site) -> None:
    """Both are told; only a qualified name selects either."""
    site.add("aaa", site.attention("mine"), version="0.1")
    site.add("zzz", site.attention("mine"), version="0.2")
    found = site.look()
    assert [site.record(found, "aaa").problems, site.record(found, "zzz").problems] == [
        ("attention 'mine' is also claimed by zzz 0.2 (zzz-ep): write 'plugin:aaa/mine'",),
        ("attention 'mine' is also claimed by aaa 0.1 (aaa-ep): write 'plugin:zzz/mine'",),
    ]
    with pytest.raises(SelectionError) as caught:
        found.find("attention", parse("mine"))
    for name in ("aaa", "zzz"):
        assert f"'plugin:{name}/mine'" in str(caught.value)
        assert found.find("attention", parse(f"plugin:{name}/mine")).distribution == name
    site.assert_built_ins_work(found)


@pytest.mark.parametrize(("name", "own"), [("sdpa", "sdpa"), ("cpu-decode", "cpu_decode"),
                                           ("flash.attention-2", "flash_attention_2")])  # fmt: skip
def test_a_stranger_does_not_get_a_name_of_our_own(
    site: Site, name: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not one that only looks like it, not from `auto`, and not beside another stranger."""
    eager = site.attention(name).replace("# more", "auto_rank = 10**6")
    for distribution in ("aaa", "zzz"):
        site.add(distribution, eager)
    found = site.look()
    for distribution in ("aaa", "zzz"):
        address = f"'plugin:{distribution}/{name}'"
        (problem,) = site.record(found, distribution).problems
        assert (
            problem
            == f"attention {name!r} is a name of jackfield's own: only {address} is this one"
        )
        theirs = found.find("attention", parse(f"{distribution}/{name}"))
        assert (theirs.distribution, theirs.bare) == (distribution, False)
        assert found.address(theirs) == f"plugin:{distribution}/{name}"
    ours = found.find("attention", parse(own))
    assert ours.distribution == "jackfield"
    assert found.address(ours) == own
    assert not any(p.problems for p in found.plugins if p.distribution == "jackfield")
    monkeypatch.setattr("jackfield.api.registry", lambda: found)
    assert jackfield.plan("demo")["attention"].registered.distribution == "jackfield"


@pytest.mark.parametrize("variable", ["JACKFIELD_DISABLE", "JACKFIELD_PLUGINS"])
def test_a_name_of_our_own_that_is_left_out_is_nobody_elses(site: Site, variable: str) -> None:
    site.add("aaa", site.attention("sdpa"))
    found = site.look(
        **{variable: {"JACKFIELD_DISABLE": "attention-sdpa", "JACKFIELD_PLUGINS": "aaa"}[variable]}
    )
    with pytest.raises(SelectionError, match=r"nobody else's stands in for it.*'plugin:aaa/sdpa'"):
        found.find("attention", parse("sdpa"))
    assert found.find("attention", parse("aaa/sdpa")).distribution == "aaa"


def test_a_strangers_entry_point_on_our_module_takes_nothing_away(site: Site) -> None:
    site.add("aaa", "", entry_points={"thief": "jackfield_plugins.attention.sdpa"})
    found = site.look()
    assert "a name of jackfield's own" in site.record(found, "aaa").problems[0]
    assert found.find("attention", parse("sdpa")).distribution == "jackfield"
    site.assert_built_ins_work(found)


def test_one_distribution_claims_a_name_twice(site: Site) -> None:
    site.add(
        "twin",
        site.attention("same").replace("[Backend()]", "[Backend(), Backend()]"),
        entry_points={"one": "outside_twin", "two": "outside_twin"},
    )
    found = site.look()
    one, two = (plugin for plugin in found.plugins if plugin.distribution == "twin")
    assert one.backends == ("attention:same",)
    assert two.backends == ()
    assert "also claimed by twin 1.5 (two)" in one.problems[0]
    assert any("unused" in problem for problem in one.problems)
    assert "also claimed by twin 1.5 (one)" in two.problems[0]
    assert found.find("attention", parse("same")).entry_point == "one"
    site.assert_built_ins_work(found)


def test_one_plugin_may_offer_several_kinds(site: Site) -> None:
    more = """
from jackfield.contracts import Decoding, DecodingCapabilities

class Dice(Decoding):
    name = "dice"
    capabilities = DecodingCapabilities()
    def bind(self, context): ...

@hookimpl
def jackfield_decoding():
    return [Dice()]
"""
    site.add("several", site.attention("kernel") + more)
    assert site.record(site.look(), "several").backends == ("attention:kernel", "decoding:dice")


def test_a_hook_of_a_later_jackfield_may_be_optional(site: Site) -> None:
    later = "\n@hookimpl(optionalhook=True)\ndef jackfield_telepathy():\n    return []\n"
    site.add("early", site.attention("early") + later)
    assert site.record(site.look(), "early").backends == ("attention:early",)


def test_the_order_does_not_depend_on_the_path(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, names in (("one", ("zeta", "alpha")), ("two", ("Mid", "beta"))):
        for name in names:
            site.beside(folder).add(name, site.attention(name.lower()))
    orders = []
    for folders in (("one", "two"), ("two", "one")):
        with monkeypatch.context() as patch:
            for folder in folders:
                patch.syspath_prepend(tmp_path / folder)
            found = site.look()
            orders.append(
                (
                    [(p.distribution, p.entry_point) for p in found.plugins],
                    [r.name for r in found.of_kind("attention")],
                )
            )
    assert orders[0] == orders[1]
    assert [d for d, _ in orders[0][0] if d != "jackfield"] == ["alpha", "beta", "Mid", "zeta"]


@pytest.mark.parametrize("name", ["my-kernels", "My_Kernels", "mine-ep"])
def test_disabled_by_distribution_or_entry_point(site: Site, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "imported"
    source = f"open({str(trace)!r}, 'w').close()\n" + site.attention("mine")
    site.add("my-kernels", source, entry_points={"mine-ep": "outside_my_kernels"})
    found = site.look(JACKFIELD_DISABLE=f" {name} ,")
    mine = site.record(found, "my-kernels")
    assert (mine.state, mine.cause) == ("disabled", "in JACKFIELD_DISABLE")
    assert not trace.exists()
    assert found.warnings == []
    site.assert_built_ins_work(found)


def test_only_the_allowed_are_loaded(site: Site) -> None:
    site.add("mine", site.attention("mine"))
    found = site.look(JACKFIELD_PLUGINS="mine, attention-eager, cache-dynamic, nobody")
    loaded = {p.entry_point for p in found.plugins if p.state == "loaded"}
    assert loaded == {"mine-ep", "attention-eager", "cache-dynamic"}
    assert {p.cause for p in found.plugins if p.state != "loaded"} == {"not in JACKFIELD_PLUGINS"}
    assert found.warnings == ["JACKFIELD_PLUGINS names 'nobody', which is not installed"]


def test_the_block_list_wins_over_the_allow_list(site: Site) -> None:
    site.add("mine", site.attention("mine"))
    found = site.look(JACKFIELD_PLUGINS="mine", JACKFIELD_DISABLE="mine,sdpa")
    assert {p.state for p in found.plugins} == {"disabled"}
    assert found.warnings == ["JACKFIELD_DISABLE names 'sdpa', which is not installed"]


def test_no_plugins_at_all(site: Site) -> None:
    found = site.look(JACKFIELD_PLUGINS="")
    assert {p.state for p in found.plugins} == {"disabled"}
    with pytest.raises(SelectionError, match=r"pip install jackfield.*jackfield doctor"):
        found.find("attention", parse("sdpa"))
