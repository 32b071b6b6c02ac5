"""generated/ is what the compiler writes today, and short enough to be read."""

from tests.emit.regenerate import GENERATED, generated_files


def test_generated_sources_are_current():
    wanted = generated_files()
    found = {
        path.relative_to(GENERATED).as_posix(): path.read_text(encoding="utf-8")
        for path in GENERATED.rglob("*")
        if path.is_file()
    }
    stale = [name for name in wanted if found.get(name) != wanted[name]]
    assert not stale, f"run `make generated` and read the diff: {stale}"
    assert found.keys() == wanted.keys()


def test_generated_sources_stay_readable():
    assert sum(text.count("\n") for text in generated_files().values()) <= 4000
