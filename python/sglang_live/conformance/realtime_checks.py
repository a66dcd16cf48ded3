"""Checks of the Realtime API over its WebSocket: core, audio, tools, transcription."""

import json
from typing import Any

from websockets.exceptions import InvalidStatus

from sglang_live.conformance.server import RATE_HZ, Server, Session, Skip, Violation, hold

MANUAL = {"input": {"turn_detection": None}}
QUESTION = "What is the capital of France?"
LONG = "Tell me a story."
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
        "additionalProperties": False,
    },
}


# --- core ---


async def session_created(server: Server) -> None:
    """A connection begins with session.created, of the type realtime."""
    async with server.session() as session:
        shown = session.events[0]["session"]
        hold(shown.get("type") == "realtime", f"type is {shown.get('type')!r}")
        hold(shown.get("id") and shown.get("model"), "the session has no id or model")


async def session_update_round_trip(server: Server) -> None:
    """What the server shows of a session can be sent back, and changes nothing."""
    async with server.session() as session:
        shown = await session.update(instructions="Be brief.", max_output_tokens=200)
        hold(shown["instructions"] == "Be brief.", "instructions are not shown as set")
        hold(shown["max_output_tokens"] == 200, "max_output_tokens is not shown as set")
        unchanged = ("id", "object", "expires_at", "model")
        sent = {name: value for name, value in shown.items() if name not in unchanged}
        await session.send("session.update", session=sent)
        again = (await session.find("session.updated"))["session"]
        different = [name for name in shown if again.get(name) != shown[name]]
        hold(not different, f"sent back, these change: {different}")


async def session_update_is_sparse(server: Server) -> None:
    """An update keeps what it does not name."""
    async with server.session() as session:
        await session.update(instructions="Be brief.")
        shown = await session.update(output_modalities=["text"])
        hold(shown["instructions"] == "Be brief.", "the instructions are gone")


async def unknown_event(server: Server) -> None:
    """An event of an unknown type is an error that names it, and changes nothing."""
    async with server.session() as session:
        await session.refusal(await session.send("session.sing"))
        await session.lives()


async def malformed_frames(server: Server) -> None:
    """Frames that are no events are errors, one each; the connection stays."""
    async with server.session() as session:
        for frame in ("{", "[]", "7", '"session.update"', "{}", '{"type": 7}', '{"type": null}'):
            await session.raw(frame)
            await session.refusal()
        await session.lives()


async def malformed_fields(server: Server) -> None:
    """Fields that are missing or of another type are errors that name their event."""
    async with server.session() as session:
        for kind, fields in (
            ("session.update", {}),
            ("session.update", {"session": {"type": "realtime", "instructions": 7}}),
            ("session.update", {"session": {"type": "realtime", "output_modalities": ["smell"]}}),
            ("conversation.item.create", {}),
            ("conversation.item.create", {"item": {"type": "letter"}}),
            ("conversation.item.create", {"item": {"type": "message", "role": "user"}}),
            ("input_audio_buffer.append", {}),
            ("input_audio_buffer.append", {"audio": "not base64!"}),
            ("conversation.item.delete", {"item_id": "item_unknown"}),
            ("conversation.item.retrieve", {"item_id": "item_unknown"}),
            ("response.create", {"response": {"max_output_tokens": "many"}}),
        ):
            await session.refusal(await session.send(kind, **fields))
        await session.lives()


async def items(server: Server) -> None:
    """Items are added with the id of the client, retrieved, placed and deleted."""
    async with server.session() as session:
        for item_id, after in (("item_a", None), ("item_c", None), ("item_b", "item_a")):
            content = [{"type": "input_text", "text": f"This is {item_id}."}]
            item = {"id": item_id, "type": "message", "role": "user", "content": content}
            place = {"previous_item_id": after} if after else {}
            await session.send("conversation.item.create", item=item, **place)
            added = await session.find("conversation.item.added")
            hold(added["item"]["id"] == item_id, "the client's id is not kept")
            await session.find("conversation.item.done")
        hold(added["previous_item_id"] == "item_a", "previous_item_id is not kept")
        await session.send("conversation.item.retrieve", item_id="item_c")
        found = (await session.find("conversation.item.retrieved"))["item"]
        hold(found["content"][0]["text"] == "This is item_c.", "another text is retrieved")
        await session.send("conversation.item.delete", item_id="item_c")
        gone = await session.find("conversation.item.deleted")
        hold(gone["item_id"] == "item_c", "another item is deleted")
        await session.refusal(await session.send("conversation.item.retrieve", item_id="item_c"))


async def text_response(server: Server) -> None:
    """A response in text: its deltas are its text, and it has a usage."""
    async with server.session() as session:
        await session.update(output_modalities=["text"])
        await session.write(QUESTION)
        done = await session.response()
        hold(done["status"] == "completed", f"its status is {done['status']}")
        usage = done.get("usage") or {}
        hold((usage.get("output_tokens") or 0) > 0, "the usage counts no output")
        kinds = {event["type"] for event in session.events}
        hold("response.output_text.delta" in kinds, "there is no response.output_text.delta")
        hold("response.output_audio.delta" not in kinds, "there is audio")
        await session.quiet(0.5, "response.")


async def cancel_nothing(server: Server) -> None:
    """response.cancel without a response is an error."""
    async with server.session() as session:
        await session.refusal(await session.send("response.cancel"))


async def cancel(server: Server) -> None:
    """A response that is cancelled ends once, as cancelled."""
    async with server.session() as session:
        await session.write(LONG)
        await session.send("response.create")
        await session.find("response.created")
        await session.send("response.cancel")
        done = (await session.find("response.done"))["response"]
        if done["status"] == "completed":
            raise Skip("the response was over before the cancel")
        hold(done["status"] == "cancelled", f"its status is {done['status']}")
        reason = (done.get("status_details") or {}).get("reason")
        hold(reason == "client_cancelled", f"its reason is {reason!r}")
        await session.quiet(0.5, "response.")


async def second_response(server: Server) -> None:
    """A second response beside one in the conversation is an error."""
    async with server.session() as session:
        await session.write(LONG)
        await session.send("response.create")
        await session.find("response.created")
        refused = await session.send("response.create")
        while (event := await session.next())["type"] != "error":
            if event["type"] == "response.done":
                raise Skip("the first response was over before the second was asked for")
        hold(event["error"].get("event_id") == refused, "the error does not name the event")


async def out_of_band(server: Server) -> None:
    """A response out of band has its metadata, and adds nothing to the conversation."""
    async with server.session() as session:
        content = [{"type": "input_text", "text": QUESTION}]
        done = await session.response(
            conversation="none",
            metadata={"topic": "rivers"},
            output_modalities=["text"],
            input=[{"type": "message", "role": "user", "content": content}],
        )
        hold(done.get("metadata") == {"topic": "rivers"}, "the metadata are not those asked for")
        hold(done.get("conversation_id") is None, "it has a conversation")
        kinds = [event["type"] for event in session.events]
        hold("conversation.item.added" not in kinds, "an item is added to the conversation")


async def output_limit(server: Server) -> None:
    """A response that reaches max_output_tokens is incomplete, and says why."""
    async with server.session() as session:
        await session.update(output_modalities=["text"])
        await session.write(LONG)
        done = await session.response(max_output_tokens=2)
        reason = (done.get("status_details") or {}).get("reason")
        hold((done["status"], reason) == ("incomplete", "max_output_tokens"),
             f"it is {done['status']}, because of {reason!r}")  # fmt: skip


async def wrong_key(server: Server) -> None:
    """A wrong key is HTTP 401."""
    if server.key is None:
        raise Skip("no --key")
    try:
        path = f"/v1/realtime?model={server.model}"
        async with server.socket(path, {"Authorization": "Bearer wrong"}):
            raise Violation("the connection is accepted")
    except InvalidStatus as refused:
        hold(refused.response.status_code == 401, f"it is {refused.response.status_code}")


async def client_secret(server: Server) -> None:
    """A client secret opens a session with its settings."""
    async with server.http() as http:
        session = {"type": "realtime", "instructions": "Be kind."}
        answer = await http.post("/v1/realtime/client_secrets", json={"session": session})
    hold(answer.status_code == 200, f"POST /v1/realtime/client_secrets is {answer.status_code}")
    value = answer.json()["value"]
    hold(value.startswith("ek_"), "the secret does not begin with ek_")
    path, bearer = f"/v1/realtime?model={server.model}", {"Authorization": f"Bearer {value}"}
    async with server.socket(path, bearer) as socket:
        first = await Session(socket).next()
        hold(first["session"]["instructions"] == "Be kind.", "its settings are not those")


# --- audio ---


async def spoken_response(server: Server) -> None:
    """A spoken response has PCM of 24 kHz, and its words."""
    async with server.session() as session:
        await session.write(QUESTION)
        done = await session.response(output_modalities=["audio"])
        pcm = session.sound(done["id"])
        hold(len(pcm) > RATE_HZ and len(pcm) % 2 == 0, f"{len(pcm)} bytes of audio")
        part = done["output"][0]["content"][0]
        hold(part["type"] == "output_audio" and part.get("transcript"), "it has no transcript")


async def g711(server: Server) -> None:
    """Output in G.711 has 8000 bytes a second."""
    lengths = {}
    for form in ({"type": "audio/pcm", "rate": RATE_HZ}, {"type": "audio/pcmu"}):
        async with server.session() as session:
            await session.update(audio={"output": {"format": form}})
            await session.write(QUESTION)
            done = await session.response()
            lengths[form["type"]] = len(session.sound(done["id"]))
    share = lengths["audio/pcmu"] / lengths["audio/pcm"]
    hold(1 / 12 < share < 1 / 3, f"of PCM's bytes it has {share:.2f}")


async def push_to_talk(server: Server) -> None:
    """Without turn detection, a commit makes an item, and nothing responds unasked."""
    async with server.session() as session:
        await session.update(audio=MANUAL)
        await session.append(await server.speech())
        await session.send("input_audio_buffer.commit")
        committed = await session.find("input_audio_buffer.committed")
        added = await session.find("conversation.item.added")
        hold(added["item"]["id"] == committed["item_id"], "another item is added")
        await session.quiet(1.0, "response.", "input_audio_buffer.speech")
        done = await session.response()
        hold(done["status"] == "completed", f"the response is {done['status']}")


async def empty_commit(server: Server) -> None:
    """A commit without audio is an error."""
    async with server.session() as session:
        await session.update(audio=MANUAL)
        error = await session.refusal(await session.send("input_audio_buffer.commit"))
        code = error.get("code")
        hold(code == "input_audio_buffer_commit_empty", f"its code is {code!r}")


async def clear(server: Server) -> None:
    """A cleared buffer is empty."""
    async with server.session() as session:
        await session.update(audio=MANUAL)
        await session.append(await server.speech())
        await session.send("input_audio_buffer.clear")
        await session.find("input_audio_buffer.cleared")
        await session.refusal(await session.send("input_audio_buffer.commit"))


async def bad_audio(server: Server) -> None:
    """Half a sample is an error, and changes nothing."""
    async with server.session() as session:
        await session.update(audio=MANUAL)
        await session.refusal(await session.send("input_audio_buffer.append", audio="AAAA"))
        await session.refusal(await session.send("input_audio_buffer.commit"))


async def server_vad(server: Server) -> None:
    """Speech is found, committed and answered; its times are in order."""
    await _spoken_turn(server, {"type": "server_vad"})


async def semantic_vad(server: Server) -> None:
    """The same with semantic_vad."""
    await _spoken_turn(server, {"type": "semantic_vad", "eagerness": "high"})


async def _spoken_turn(server: Server, detection: dict[str, Any]) -> None:
    speech = await server.speech()
    async with server.session() as session:
        await session.update(audio={"input": {"turn_detection": detection}})
        await session.say(speech)
        started = await session.find("input_audio_buffer.speech_started")
        stopped = await session.find("input_audio_buffer.speech_stopped")
        committed = await session.find("input_audio_buffer.committed")
        ids = {event["item_id"] for event in (started, stopped, committed)}
        hold(len(ids) == 1, "start, stop and commit are of several items")
        hold(started["audio_start_ms"] < stopped["audio_end_ms"], "it stops before it starts")
        await session.find("response.created")
        await session.find("response.done", within_s=60)


async def no_automatic_response(server: Server) -> None:
    """With create_response false, a turn is committed and not answered."""
    speech = await server.speech()
    async with server.session() as session:
        detection = {"type": "server_vad", "create_response": False}
        await session.update(audio={"input": {"turn_detection": detection}})
        await session.say(speech)
        await session.find("input_audio_buffer.committed")
        await session.quiet(1.0, "response.")


async def truncation(server: Server) -> None:
    """A heard answer can be truncated where it was heard, and not behind its end."""
    async with server.session() as session:
        await session.write(QUESTION)
        done = await session.response(output_modalities=["audio"])
        place = {"item_id": done["output"][0]["id"], "content_index": 0}
        await session.send("conversation.item.truncate", audio_end_ms=300, **place)
        cut = await session.find("conversation.item.truncated")
        hold(cut["audio_end_ms"] == 300, "another position is confirmed")
        sent = await session.send("conversation.item.truncate", audio_end_ms=9_000_000, **place)
        await session.refusal(sent)


async def barge_in(server: Server) -> None:
    """Speech over a response ends it: turn_detected."""
    speech = await server.speech()
    async with server.session() as session:
        await session.write(LONG)
        await session.send("response.create")
        await session.find("response.output_audio.delta")
        await session.say(speech)
        done = (await session.find("response.done", within_s=60))["response"]
        if done["status"] == "completed":
            raise Skip("the response was made before the speech began")
        reason = (done.get("status_details") or {}).get("reason")
        hold((done["status"], reason) == ("cancelled", "turn_detected"),
             f"it is {done['status']}, because of {reason!r}")  # fmt: skip


async def input_transcription(server: Server) -> None:
    """The user's words come as an event of the item."""
    speech = await server.speech()
    async with server.session() as session:
        transcription = {"model": "gpt-4o-mini-transcribe"}
        await session.update(audio={"input": {**MANUAL["input"], "transcription": transcription}})
        await session.append(speech)
        await session.send("input_audio_buffer.commit")
        kind = "conversation.item.input_audio_transcription.completed"
        done = await session.find(kind, within_s=60)
        hold(done["transcript"].strip(), "the transcript is empty")


# --- tools ---


async def tools_are_shown(server: Server) -> None:
    """Functions and the choice among them are shown as set."""
    async with server.session() as session:
        shown = await session.update(tools=[WEATHER], tool_choice="auto")
        hold([tool["name"] for tool in shown["tools"]] == ["weather"], "the tool is not shown")
        hold(shown["tool_choice"] == "auto", "the choice is not shown")


async def forced_call(server: Server) -> None:
    """A forced call has arguments of the schema; its output is answered."""
    async with server.session() as session:
        await session.update(tools=[WEATHER])
        await session.write("What is the weather in Rome?")
        done = await session.response(tool_choice={"type": "function", "name": "weather"})
        [call] = [item for item in done["output"] if item["type"] == "function_call"] or [None]
        hold(call is not None, f"it calls nothing: {done['output']}")
        assert call is not None
        arguments = json.loads(call["arguments"])
        hold(isinstance(arguments.get("town"), str), f"its arguments are {arguments}")
        kind = "response.function_call_arguments.done"
        told = [event for event in session.events if event["type"] == kind]
        hold(len(told) == 1 and told[0]["call_id"] == call["call_id"], f"no {kind}")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        await session.send("conversation.item.create", item=output)
        await session.find("conversation.item.added")
        answer = await session.response(tool_choice="none")
        hold(answer["status"] == "completed", f"the answer is {answer['status']}")


async def no_call(server: Server) -> None:
    """With tool_choice none, nothing is called."""
    async with server.session() as session:
        await session.update(tools=[WEATHER], tool_choice="none", output_modalities=["text"])
        await session.write("What is the weather in Rome?")
        done = await session.response()
        hold(all(item["type"] == "message" for item in done["output"]), "it calls a function")


async def unknown_tool(server: Server) -> None:
    """To force a function that does not exist is an error."""
    async with server.session() as session:
        choice = {"type": "function", "name": "absent"}
        await session.refusal(
            await session.send("response.create", response={"tool_choice": choice})
        )


# --- transcription ---

INTENT = "intent=transcription"


async def transcription_created(server: Server) -> None:
    """?intent=transcription begins a transcription session at once."""
    async with server.session(INTENT) as session:
        kind = session.events[0]["session"].get("type")
        hold(kind == "transcription", f"its type is {kind!r}")


async def transcription_with_a_model(server: Server) -> None:
    """`model` may be that of the transcription."""
    async with server.session(f"{INTENT}&model=gpt-4o-transcribe") as session:
        await session.send("session.update", session={"type": "transcription"})
        await session.find("session.updated")


async def transcribed_commit(server: Server) -> None:
    """A commit is transcribed, and never answered."""
    speech = await server.speech()
    async with server.session(INTENT) as session:
        await session.send("session.update", session={"type": "transcription", "audio": MANUAL})
        await session.find("session.updated")
        await session.append(speech)
        await session.send("input_audio_buffer.commit")
        committed = await session.find("input_audio_buffer.committed")
        kind = "conversation.item.input_audio_transcription.completed"
        done = await session.find(kind, within_s=60)
        hold(done["item_id"] == committed["item_id"], "the transcript is of another item")
        hold(done["transcript"].strip(), "the transcript is empty")
        await session.quiet(0.5, "response.")


async def transcription_does_not_respond(server: Server) -> None:
    """response.create is an error there."""
    async with server.session(INTENT) as session:
        await session.refusal(await session.send("response.create"))


async def transcription_secret(server: Server) -> None:
    """A client secret of that type opens such a session."""
    async with server.http() as http:
        form = {"session": {"type": "transcription"}}
        answer = await http.post("/v1/realtime/client_secrets", json=form)
    hold(answer.status_code == 200, f"POST /v1/realtime/client_secrets is {answer.status_code}")
    bearer = {"Authorization": f"Bearer {answer.json()['value']}"}
    async with server.socket("/v1/realtime", bearer) as socket:
        first = await Session(socket).next()
        hold(first["session"].get("type") == "transcription", "it is no transcription session")


CORE = (
    session_created, session_update_round_trip, session_update_is_sparse, unknown_event,
    malformed_frames, malformed_fields, items, text_response, cancel_nothing, cancel,
    second_response, out_of_band, output_limit, wrong_key, client_secret,
)  # fmt: skip
AUDIO = (
    spoken_response, g711, push_to_talk, empty_commit, clear, bad_audio, server_vad, semantic_vad,
    no_automatic_response, truncation, barge_in, input_transcription,
)  # fmt: skip
TOOLS = (tools_are_shown, forced_call, no_call, unknown_tool)
TRANSCRIPTION = (
    transcription_created, transcription_with_a_model, transcribed_commit,
    transcription_does_not_respond, transcription_secret,
)  # fmt: skip
