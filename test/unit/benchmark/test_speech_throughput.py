"""Texts and figures of the benchmark of speech without a listener."""

from benchmark.speech_throughput import Row, summary, texts


def test_all_texts_differ():
    found = texts(1000)
    assert len(set(found)) == 1000 and all(20 < len(text) < 250 for text in found)


def test_audio_of_failed_requests_does_not_count_and_their_time_does():
    def row(block: int, began_s: float, took_s: float, status: str = "200") -> Row:
        audio_s = 6.0 if status == "200" else 0.0
        return Row(
            arm="streaming",
            block=block,
            status=status,
            audio_s=audio_s,
            began_s=began_s,
            took_s=took_s,
        )

    # Two blocks of 4 and 2 s; the time between them is another arm's.
    found = summary([row(0, 0.0, 2.0), row(0, 1.0, 3.0), row(1, 9.0, 2.0, "500")])
    assert (found["n"], found["failed"]) == (3, 1)
    assert (found["audio_s"], found["wall_s"], found["inverse_rtf"]) == (12.0, 6.0, 2.0)
