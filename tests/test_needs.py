import pytest
from needs import missing, skip_without_needs


@pytest.mark.needs  # so it is also run where the other needs are hidden
def test_a_test_whose_need_is_missing_is_skipped_with_the_reason(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    request.node.add_marker(pytest.mark.needs("chromium"))
    missing.cache_clear()
    with pytest.raises(pytest.skip.Exception, match="needs the program chromium; install chromium"):
        skip_without_needs(request.node)
    missing.cache_clear()
