// A complete small engine without a model, in one file and no dependency: paged blocks, prefix
// cache, chunked prefill, continuous batching, preemption. It speaks the JSON lines of
// docs/protocol.md on its own:  nanovllm conformance run --engine 'cmd:node engine.mjs'

import { createInterface } from "node:readline";

class Refused extends Error {}

// ---- blocks ----------------------------------------------------------------------------------

// A prefix is known by an id: that of the pair (id of the prefix before this block, its tokens).
// Ids are interned and never hashed, so a different prefix is never a hit.
class Pool {
  constructor({ num_blocks, block_size, prefix_cache }) {
    Object.assign(this, { size: block_size, caching: prefix_cache });
    this.refs = Array(num_blocks).fill(0);
    this.tokens = Array(num_blocks).fill(null); // of a published block
    this.key = Array(num_blocks).fill(null); // its prefix id
    this.byKey = new Map(); // prefix id -> published blocks
    this.prefixIds = new Map();
    this.free = this.refs.map((_, block) => block); // in order of reuse
  }

  blocksFor = (count) => Math.ceil(count / this.size);

  // Prefix ids of the full blocks among the first `count` tokens of a request.
  keys({ tokens, salt, prefix }, count) {
    while (prefix.length < Math.floor(count / this.size)) {
      const i = prefix.length;
      const own = tokens.slice(i * this.size, (i + 1) * this.size);
      const pair = JSON.stringify([i ? prefix[i - 1] : salt, own]);
      if (!this.prefixIds.has(pair)) this.prefixIds.set(pair, this.prefixIds.size);
      prefix.push(this.prefixIds.get(pair));
    }
    return prefix.slice(0, Math.floor(count / this.size));
  }

  // Published blocks that hold the leading `count` tokens, up to the first miss.
  lookup(request, count) {
    const hits = [];
    if (!this.caching) return hits;
    for (const key of this.keys(request, count)) {
      const twins = this.byKey.get(key);
      if (!twins) break;
      hits.push(twins.find((block) => this.refs[block]) ?? twins[0]);
    }
    return hits;
  }

  fits(hits, count) {
    const revived = hits.filter((block) => !this.refs[block]).length;
    return revived + this.blocksFor(count) - hits.length <= this.free.length;
  }

  take(hits) {
    for (const block of hits) {
      if (this.refs[block]++ === 0) this.free.splice(this.free.indexOf(block), 1);
    }
    return [...hits];
  }

  grow(table, count) {
    while (table.length < this.blocksFor(count)) {
      const block = this.free.shift();
      this.unpublish(block);
      this.refs[block] = 1;
      table.push(block);
    }
  }

  // Unpublished blocks are reused first, of the others the one that was released first. The tail
  // goes first, so that a descendant is reused before its ancestor.
  release(table) {
    for (const block of table.splice(0).reverse()) {
      if (--this.refs[block]) continue;
      if (this.key[block] === null) this.free.unshift(block);
      else this.free.push(block);
    }
  }

  // The blocks of a request that filled up while [start, end) was computed can be hit from now on.
  publish(request, start, end) {
    if (!this.caching) return;
    const keys = this.keys(request, end);
    for (let i = Math.floor(start / this.size); i < keys.length; i++) {
      const block = request.table[i];
      if (this.key[block] !== null) continue;
      this.key[block] = keys[i];
      this.tokens[block] = request.tokens.slice(i * this.size, (i + 1) * this.size);
      this.byKey.set(keys[i], [...(this.byKey.get(keys[i]) ?? []), block]);
    }
  }

  unpublish(block) {
    const key = this.key[block];
    if (key === null) return;
    const twins = this.byKey.get(key).filter((other) => other !== block);
    if (twins.length) this.byKey.set(key, twins);
    else this.byKey.delete(key);
    this.key[block] = this.tokens[block] = null;
  }

  view() {
    const published = [...this.byKey.values()].flat();
    return {
      free: this.free,
      ref_counts: this.refs.flatMap((count, block) => (count ? [[block, count]] : [])),
      published: published.map((block) => [block, this.tokens[block]]),
    };
  }
}

// ---- scheduler -------------------------------------------------------------------------------

// One policy: running requests first, oldest first, then whoever waits, in order of arrival.
class Engine {
  hello = () => ({
    protocol: 1,
    engine: "engine.mjs",
    version: "1",
    doors: ["core"],
    capabilities: [
      "abort", "chunked_prefill", "fail_step", "min_tokens", "pool", "prefix_cache", "salt",
      "stats", "stop",
    ],
  });

  reset({ world }) {
    if (world.max_num_batched_tokens < world.max_num_seqs) {
      throw new Refused(
        `${world.max_num_batched_tokens} tokens a step for ${world.max_num_seqs} requests`);
    }
    this.world = world;
    this.blocks = new Pool(world);
    this.requests = new Map(); // live ones
    this.waiting = []; // both in order of arrival
    this.running = [];
    this.plan = null; // in flight
    this.steps = 0;
    this.totals = { num_lookup_tokens: 0, num_cached_tokens: 0 };
  }

  add({ request, prompt, max_tokens, options }) {
    const { num_blocks, block_size, max_model_len } = this.world;
    const slots = num_blocks * block_size;
    if (!prompt.length) throw new Refused("an empty prompt: 0 tokens");
    if (!Number.isInteger(max_tokens) || max_tokens < 1)
      throw new Refused(`max_tokens is ${max_tokens}, not an integer >= 1`);
    if (options.min_tokens > max_tokens)
      throw new Refused(`min_tokens is ${options.min_tokens}, max_tokens ${max_tokens}`);
    if (prompt.length >= max_model_len || prompt.length > slots)
      throw new Refused(
        `${prompt.length} tokens, but max_model_len is ${max_model_len} and ${slots} slots exist`);
    const room = Math.min(max_model_len - prompt.length, slots - prompt.length + 1);
    const fresh = {
      id: request, tokens: [...prompt], prompt: prompt.length, most: Math.min(max_tokens, room),
      options, salt: options.salt ?? "", prefix: [], table: [], computed: 0, counted: false,
      aborted: false,
    };
    this.requests.set(request, fresh);
    this.waiting.push(fresh);
    return null;
  }

  schedule() {
    const plan = { step: this.steps, rows: [], preempted: [] };
    if (this.plan) return plan;
    let budget = this.world.max_num_batched_tokens;
    const serve = (request) => {
      // Every younger one that runs gets a token too; there is one for each.
      const younger = this.running.length - 1 - this.running.indexOf(request);
      const count = Math.min(request.tokens.length - request.computed, budget - younger);
      if (!this.makeRoom(request, count, plan)) return;
      const { id, computed: start, table } = request;
      this.blocks.grow(table, start + count);
      budget -= count;
      plan.rows.push({ id, start, count, block_table: [...table] });
    };
    // Preemption shortens the list from its end, while it is walked.
    for (let i = 0; i < this.running.length; i++) serve(this.running[i]);
    while (budget && !plan.preempted.length && this.admit()) serve(this.running.at(-1));
    if (plan.rows.length) {
      this.plan = plan;
      this.steps++;
    }
    return plan;
  }

  // Preempt the newest until `request` can compute `count` more; false if that was itself.
  makeRoom(request, count, plan) {
    const { blocks } = this;
    const needed = blocks.blocksFor(request.computed + count) - request.table.length;
    while (needed > blocks.free.length) {
      const victim = this.running.pop();
      blocks.release(victim.table);
      victim.computed = 0;
      this.waiting.unshift(victim);
      plan.preempted.push(victim.id);
      if (victim === request) return false;
    }
    return true;
  }

  // Give the first in the queue a seat, if there is one, and blocks for all of its tokens.
  admit() {
    const [request] = this.waiting;
    if (!request || this.running.length === this.world.max_num_seqs) return false;
    const { tokens } = request;
    const hits = this.blocks.lookup(request, tokens.length - 1);
    if (!this.blocks.fits(hits, tokens.length)) return false;
    request.table = this.blocks.take(hits);
    request.computed = hits.length * this.world.block_size;
    if (!request.counted) {
      request.counted = true;
      this.totals.num_lookup_tokens += tokens.length;
      this.totals.num_cached_tokens += request.computed;
    }
    this.running.push(this.waiting.shift());
    return true;
  }

  commit({ tokens }) {
    const sampled = new Map(tokens.map(([[request], token]) => [request, token]));
    const finished = [];
    for (const { id, start, count } of this.plan?.rows ?? []) {
      const request = this.requests.get(id);
      const end = start + count;
      if (request.aborted) {
        finished.push(this.end(request, "abort"));
        continue;
      }
      request.computed = end;
      this.blocks.publish(request, start, end);
      if (end < request.tokens.length) continue;
      request.tokens.push(sampled.get(id));
      const reason = this.reasonToEnd(request, sampled.get(id));
      if (reason) finished.push(this.end(request, reason));
    }
    this.plan = null;
    return finished;
  }

  reasonToEnd({ tokens, prompt, most, options }, token) {
    const eos = !options.ignore_eos && this.world.eos_token_ids.includes(token);
    const outputs = tokens.length - prompt;
    if ((eos || options.stop_token_ids.includes(token)) && outputs > options.min_tokens)
      return "stop";
    return outputs === most ? "length" : null;
  }

  end(request, reason) {
    this.blocks.release(request.table);
    this.requests.delete(request.id);
    this.waiting = this.waiting.filter((other) => other !== request);
    this.running = this.running.filter((other) => other !== request);
    return { id: request.id, reason };
  }

  abort({ request: id }) {
    const request = this.requests.get(id);
    if (!request || request.aborted) return false;
    // A plan that was returned is executed; its commit ends the request.
    if (this.plan?.rows.some((row) => row.id === id)) request.aborted = true;
    else this.end(request, "abort");
    return true;
  }

  fail_step() {
    const { rows } = this.plan;
    this.plan = null;
    return rows.map(({ id }) => this.end(this.requests.get(id), "error"));
  }

  pool = () => this.blocks.view();
  stats = () => this.totals;
}

// ---- protocol --------------------------------------------------------------------------------

const CALLS = [
  "hello", "reset", "add", "schedule", "commit", "abort", "fail_step", "pool", "stats",
];
const engine = new Engine();

function answer({ id, call, args }) {
  if (!CALLS.includes(call)) return { id, error: { kind: "unsupported", message: `no ${call} here` } };
  try {
    return { id, result: engine[call](args) ?? null };
  } catch (error) {
    const { message, stack } = error;
    if (error instanceof Refused) return { id, error: { kind: "refused", message } };
    return { id, error: { kind: "fault", message, traceback: stack } };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(JSON.stringify(answer(JSON.parse(line))) + "\n");
}
