// OpenAI's SDK for JavaScript: a typed question, a spoken response in answer.pcm (24 kHz, int16).
//
//   npm install openai ws
//   node openai_typed.mjs https://your-server:30000 "How are you?"
//
// This SDK speaks wss only, so the server needs --ssl-certfile; Node trusts a certificate of your
// own if NODE_EXTRA_CA_CERTS names its file.

import { writeFileSync } from "node:fs";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [url = "https://127.0.0.1:30000", question = "How are you?"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.API_KEY ?? "none" });
const model = (await client.models.list()).data[0].id;
const call = new OpenAIRealtimeWS({ model }, client);
const sound = [];

call.on("session.created", () => {
  const content = [{ type: "input_text", text: question }];
  call.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
  call.send({ type: "response.create" });
});
call.on("response.output_audio.delta", ({ delta }) => sound.push(Buffer.from(delta, "base64")));
call.on("response.output_audio_transcript.delta", ({ delta }) => process.stdout.write(delta));
call.on("error", (error) => {
  console.error(error.message);
  process.exit(1);
});
call.on("response.done", ({ response }) => {
  const pcm = Buffer.concat(sound);
  writeFileSync("answer.pcm", pcm);
  console.log(`\n${response.status}: ${(pcm.length / 48000).toFixed(1)} s of sound in answer.pcm`);
  call.close();
});
