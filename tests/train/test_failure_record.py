"""Which attempts of torchrun belong together (whole runs: tests/launch/test_torchrun.py)."""

import pytest

from weft.train.failure_record import agent, has_begun, record_last_attempt


@pytest.fixture
def agent_of(monkeypatch):
    def make(job: str, folder: str | None, attempt: int = 1) -> str:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        errors = "" if folder is None else f"{folder}/attempt_{attempt - 1}/0/error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", errors)  # "": with --log-dir /dev/null
        return agent()

    return make


def test_jobs_without_an_id_of_their_own_are_not_taken_for_one(agent_of, tmp_path):
    """torchrun without `--rdzv-id` gives every job the id `none`."""
    record_last_attempt(tmp_path, {agent_of("none", "/tmp/logs/none_a")})
    assert has_begun(tmp_path, 2, {agent_of("none", "/tmp/logs/none_a", 2)})
    assert not has_begun(tmp_path, 2, {agent_of("none", "/tmp/logs/none_b", 2)})
    assert not has_begun(tmp_path, 1, {agent_of("none", "/tmp/logs/none_a")})


def test_an_attempt_continues_the_job_if_one_of_its_hosts_is_left(agent_of, tmp_path):
    lost, left, joined = (agent_of("job", f"/tmp/logs/job_{name}") for name in ("a", "b", "c"))
    record_last_attempt(tmp_path, {lost, left})
    assert has_begun(tmp_path, 2, {left, joined})
    record_last_attempt(tmp_path, {left, joined})
    assert has_begun(tmp_path, 3, {joined})
    assert not has_begun(tmp_path, 3, {lost})


def test_without_a_folder_for_logs_the_id_of_the_job_counts(agent_of, tmp_path):
    record_last_attempt(tmp_path, {agent_of("job", None)})
    assert has_begun(tmp_path, 2, {agent_of("job", None)})
    assert not has_begun(tmp_path, 2, {agent_of("other", None)})
