// OpenAI's SDK for JavaScript. Inputs and report are described in play.py.

import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [urls, recording, short, long] = process.argv.slice(2);
const frame = 960; // bytes of 20 ms
const said = readFileSync(recording);
const question = "What is the weather in Rome?";
const tool = {
  type: "function",
  name: "weather",
  description: "The weather of a town.",
  parameters: { type: "object", properties: { town: { type: "string" } }, required: ["town"] },
};

function connect(url, apiKey = short) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
  const connection = new OpenAIRealtimeWS({ model: "demo" }, client);
  return new Promise((resolve, reject) => {
    connection.on("error", reject);
    connection.on("session.created", () => resolve(connection));
  });
}

function ask(connection) {
  const content = [{ type: "input_text", text: question }];
  connection.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
  connection.send({ type: "response.create" });
}

// A microphone: silence follows the recording, until the socket closes.
async function say(connection, afterS = 0) {
  const began = performance.now();
  connection.said = began; // ends the loop of an earlier recording
  const sound = Buffer.concat([Buffer.alloc(Math.round(afterS * 50) * frame), said]);
  for (let n = 0; connection.socket.readyState === 1 && connection.said === began; n++) {
    const piece = Buffer.alloc(frame);
    sound.subarray(n * frame, (n + 1) * frame).copy(piece);
    connection.send({ type: "input_audio_buffer.append", audio: piece.toString("base64") });
    await sleep(Math.max(0, began + (n + 1) * 20 - performance.now()));
  }
}

// The received part of the next response, and its items; null if the socket closed before.
function nextResponse(connection) {
  let text = "";
  let bytes = 0;
  return new Promise((resolve, reject) => {
    connection.on("error", reject);
    connection.on("response.output_audio_transcript.delta", ({ delta }) => (text += delta));
    connection.on("response.output_audio.delta", ({ delta }) => (bytes += Buffer.from(delta, "base64").length));
    connection.on("response.done", ({ response }) => resolve([{ text, sound_s: bytes / 48000 }, response.output]));
    connection.socket.on("close", () => resolve(null));
  });
}

const parts = {
  async text(url) {
    const connection = await connect(url);
    ask(connection);
    const [heard] = await nextResponse(connection);
    connection.close();
    return heard;
  },
  async speech(url) {
    const connection = await connect(url);
    say(connection);
    const [heard] = await nextResponse(connection);
    connection.close();
    return heard;
  },
  async tool(url) {
    const connection = await connect(url);
    connection.send({ type: "session.update", session: { type: "realtime", tools: [tool] } });
    ask(connection);
    const [, [item]] = await nextResponse(connection);
    const called = JSON.parse(item.arguments);
    const output = `It rains in ${called.town}.`;
    const result = { type: "function_call_output", call_id: item.call_id, output };
    connection.send({ type: "conversation.item.create", item: result });
    connection.send({ type: "response.create" });
    const [heard] = await nextResponse(connection);
    connection.close();
    return { called, ...heard };
  },
  // Interrupts every response, until one ends incomplete and the next has begun.
  async interruption(url) {
    const connection = await connect(url, long);
    ask(connection);
    let cut = false;
    let item_id = null;
    let bytes = 0;
    let from = 0;
    connection.on("input_audio_buffer.speech_started", () => {
      if (!bytes) return;
      // The simulated playback position.
      const played = Math.max(1, Math.floor(Math.min(bytes / 48, performance.now() - from) / 2));
      const position = { item_id, content_index: 0, audio_end_ms: played };
      connection.send({ type: "conversation.item.truncate", ...position });
    });
    connection.on("response.done", ({ response }) => (cut = response.status === "cancelled"));
    await new Promise((resolve) =>
      connection.on("response.output_audio.delta", (event) => {
        if (cut) return resolve();
        if (event.item_id !== item_id) {
          [item_id, bytes, from] = [event.item_id, 0, performance.now()];
          say(connection, 1.0);
        }
        bytes += Buffer.from(event.delta, "base64").length;
      }),
    );
    connection.close();
    return {};
  },
  async reconnect(url) {
    const connection = await connect(url);
    ask(connection);
    if (await nextResponse(connection)) throw new Error("the line did not break");
    return parts.text(url); // the SDK does not reconnect by itself
  },
};

for (const [part, url] of Object.entries(JSON.parse(urls))) {
  const began = performance.now();
  const late = sleep(90_000, null, { ref: false }).then(() => {
    throw new Error(`${part}: not within 90 s`);
  });
  const told = await Promise.race([parts[part](url), late]).catch((error) => ({ failed: error.stack }));
  const took_s = Math.round((performance.now() - began) / 100) / 10;
  console.log(JSON.stringify({ part, took_s, ...told }));
}
process.exit(0);
