"""LOCK: what is published never changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.core.errors import CheckFailed, ProtocolError
from quantkit.spec.protocol import derive_protocol, known_protocols, load_protocol, protocol_path, protocols_folder, write_protocol
from quantkit.spec.protocol_lock import lock_protocol, lock_state, locked_name, read_lock, require_locked


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A protocol file of its own."""
    path = tmp_path / "mine-v1.toml"
    path.write_text(protocol_path("demo-v1").read_text("utf-8").replace('name = "demo-v1"', 'name = "mine-v1"'), "utf-8")
    return path


def change(path: Path, old: str = "alpha = 0.05", new: str = "alpha = 0.01") -> None:
    path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")


class TestPublished:
    @pytest.mark.parametrize("name", known_protocols())
    def test_agrees_with_lock(self, name: str) -> None:
        state = lock_state(protocol_path(name))
        assert (state.locked, state.changed) == (True, ())
        require_locked(state)

    def test_nothing_else_is_locked(self) -> None:
        assert sorted(read_lock(protocols_folder())) == known_protocols()

    def test_a_protocol_is_known_by_its_ids(self) -> None:
        protocol = load_protocol("demo-v1")
        assert locked_name(protocol) == "demo-v1"
        assert locked_name(derive_protocol(protocol, ["gate.alpha=0.01"])) is None


class TestLocking:
    def test_adds_a_line_once(self, mine: Path) -> None:
        assert not lock_state(mine).locked
        assert not lock_protocol(mine).locked
        ids = load_protocol(mine).ids()
        expected = f"# name protocol_id eval_id plan_id imatrix_id mtp_id\nmine-v1 {' '.join(ids.values())}\n"
        assert (mine.parent / "LOCK").read_text("utf-8") == expected
        assert lock_protocol(mine).locked
        assert (mine.parent / "LOCK").read_text("utf-8") == expected

    def test_keeps_other_lines(self, mine: Path) -> None:
        lock_protocol(mine)
        other = mine.with_name("another-v1.toml")
        other.write_text(mine.read_text("utf-8").replace('"mine-v1"', '"another-v1"'), "utf-8")
        lock_protocol(other)
        assert list(read_lock(mine.parent)) == ["another-v1", "mine-v1"]

    def test_a_locked_protocol_does_not_change(self, mine: Path) -> None:
        lock_protocol(mine)
        before = (mine.parent / "LOCK").read_bytes()
        change(mine)
        assert lock_state(mine).changed == ("protocol_id",)
        with pytest.raises(CheckFailed, match=r"mine-v1 has changed: expected the protocol_id that LOCK holds; .* such as mine-v2"):
            lock_protocol(mine)
        assert (mine.parent / "LOCK").read_bytes() == before

    def test_the_ids_that_changed_are_named(self, mine: Path) -> None:
        lock_protocol(mine)
        change(mine, "n_ctx = 128", "n_ctx = 64")
        assert lock_state(mine).changed == ("protocol_id", "eval_id")

    def test_titles_and_comments_may_change(self, mine: Path) -> None:
        lock_protocol(mine)
        change(mine, 'title = "', '# a remark\ntitle = "Now ')
        state = lock_state(mine)
        require_locked(state)
        assert state.changed == ()
        assert load_protocol(mine).title.startswith("Now ")

    def test_a_file_is_called_as_its_protocol(self, mine: Path) -> None:
        other = mine.rename(mine.with_name("yours-v1.toml"))
        with pytest.raises(ProtocolError, match=r"name: expected 'yours-v1' as the file is called, got 'mine-v1'"):
            lock_protocol(other)

    def test_a_derived_protocol_is_not_locked(self, mine: Path) -> None:
        mine.write_bytes(write_protocol(derive_protocol(load_protocol(mine), ["gate.alpha=0.01"])))
        with pytest.raises(ProtocolError, match=r"derived: expected \[\] in a protocol of its own, got 1 settings"):
            lock_protocol(mine)

    @pytest.mark.parametrize("line", ["mine-v1", "mine-v1 a b c d", "mine-v1 a b c d e f", "a 1 2 3 4 5\na 1 2 3 4 5"])
    def test_a_damaged_lock_is_named(self, mine: Path, line: str) -> None:
        (mine.parent / "LOCK").write_text(f"# ids\n\n{line}\n", "utf-8")
        with pytest.raises(ProtocolError, match=r"LOCK, line \d: expected a new name and 5 ids, got"):
            lock_state(mine)
