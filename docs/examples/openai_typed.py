"""OpenAI's SDK, blocking: a typed question, a spoken response in answer.wav.

python openai_typed.py --url http://127.0.0.1:30000 "How are you?"
"""

import argparse
import base64
import wave

from openai import OpenAI

RATE_HZ = 24_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="How are you?")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--out", default="answer.wav")
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key=args.key)
    model = client.models.list().data[0].id
    with client.realtime.connect(model=model) as call, wave.open(args.out, "wb") as answer:
        answer.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        content = [{"type": "input_text", "text": args.question}]
        call.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        call.response.create()
        for event in call:
            if event.type == "response.output_audio.delta":
                answer.writeframes(base64.b64decode(event.delta))
            elif event.type == "response.output_audio_transcript.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "error":
                raise SystemExit(event.error.message)
            elif event.type == "response.done":
                print(f"\n{event.response.status}: {args.out}")
                return


if __name__ == "__main__":
    main()
