-- The state machine of kvloom.hf3fs.metadata.base as one script, atomic by Redis's nature.
--
-- ARGV: operation, its arguments (a MessagePack list). Answer: MessagePack, {ok = ...} or
-- {error = kind, text = ...}. Errors are raised before anything is written.
--
-- kvloom:namespaces      set of names
-- kvloom:generation      the next generation number
-- kvloom:pages           pages of all files
-- kvloom:closed          namespace that was cleared -> when its last lease ends
-- kvloom:N:facts         world; pages:R, next:R (first page never used), confirmed:R, cooling:R;
--                        last (end of the last lease), closed, no_victim; counters
-- kvloom:N:keys          key -> record {s = {rank = slot}, n = confirmed slots, l = read lease,
--                        h = hits, done}; slot {page, generation, writer, confirmed, deadline}
-- kvloom:N:slots:R       page in use -> "generation:key"; no key: cooling
-- kvloom:N:free:R        list of pages that were used and are free
-- kvloom:N:use           complete keys by their last use
-- kvloom:N:leases        "rank:page:generation" by deadline, of what is not complete
--
-- Times are microseconds of Redis's own clock.

local PAGE, GENERATION, WRITER, CONFIRMED, DEADLINE = 1, 2, 3, 4, 5
local CHUNK = 4000 -- of arguments: Lua's stack is short
local call = redis.call
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function text(number) return string.format('%.0f', number) end
local function fail(kind, why) error({kind = kind, why = why}) end
local function of(name, what) return 'kvloom:' .. name .. ':' .. what end
local function fact(name, what) return tonumber(call('HGET', of(name, 'facts'), what)) end
local function set_fact(name, what, value) call('HSET', of(name, 'facts'), what, text(value)) end
local function add(name, what, by) call('HINCRBY', of(name, 'facts'), what, by) end

local function in_chunks(command, key, values)
  for first = 1, #values, CHUNK do
    call(command, key, unpack(values, first, math.min(first + CHUNK - 1, #values)))
  end
end

local function world_of(name)
  return fact(name, 'world')
    or fail('unknown', 'namespace "' .. name .. '" is not known: initialize a rank first')
end

local function pages_of(name, rank)
  local world = world_of(name)
  return fact(name, 'pages:' .. text(rank))
    or fail('unknown', 'rank ' .. text(rank) .. ' of ' .. text(world)
      .. ' is not initialized: initialize it first')
end

local function lease_until(name, time)
  if time > (fact(name, 'last') or 0) then set_fact(name, 'last', time) end
end

local function load(name, keys)
  local records = {}
  for first = 1, #keys, CHUNK do
    local last = math.min(first + CHUNK - 1, #keys)
    local found = call('HMGET', of(name, 'keys'), unpack(keys, first, last))
    for i = first, last do
      local packed = found[i - first + 1]
      if packed and records[keys[i]] == nil then records[keys[i]] = cmsgpack.unpack(packed) end
    end
  end
  return records
end

local function save(name, key, record)
  call('HSET', of(name, 'keys'), key, cmsgpack.pack(record))
end

local function member(rank, slot)
  return rank .. ':' .. text(slot[PAGE]) .. ':' .. text(slot[GENERATION])
end

local function free_page(name, rank, page)
  call('HDEL', of(name, 'slots:' .. rank), page)
  call('RPUSH', of(name, 'free:' .. rank), page)
end

-- Free a slot of a key that is not complete.
local function free_slot(name, key, record, rank)
  local slot = record.s[rank]
  free_page(name, rank, text(slot[PAGE]))
  call('ZREM', of(name, 'leases'), member(rank, slot))
  if slot[CONFIRMED] then
    record.n = record.n - 1
    add(name, 'confirmed:' .. rank, -1)
  end
  record.s[rank] = nil
  if next(record.s) == nil then call('HDEL', of(name, 'keys'), key) else save(name, key, record) end
end

local function forget(name, key)
  call('HDEL', of(name, 'keys'), key)
  call('ZREM', of(name, 'use'), key)
end

local function drop(name, key, record)
  forget(name, key)
  for rank, slot in pairs(record.s) do
    free_page(name, rank, text(slot[PAGE]))
    add(name, 'confirmed:' .. rank, -1)
  end
end

-- Forget a key somebody may read; its pages are freed later.
local function cool(name, key, record)
  forget(name, key)
  for rank, slot in pairs(record.s) do
    call('HSET', of(name, 'slots:' .. rank), text(slot[PAGE]), text(slot[GENERATION]) .. ':')
    call('ZADD', of(name, 'leases'), text(math.max(record.l, now)), member(rank, slot))
    if slot[CONFIRMED] then add(name, 'confirmed:' .. rank, -1) end
    add(name, 'cooling:' .. rank, 1)
  end
end

local function expire(name)
  local leases = of(name, 'leases')
  for _, ended in ipairs(call('ZRANGEBYSCORE', leases, '-inf', text(now), 'LIMIT', 0, 10000)) do
    local rank, page, generation = ended:match('^(%d+):(%d+):(%d+)$')
    call('ZREM', leases, ended)
    local known = call('HGET', of(name, 'slots:' .. rank), page)
    if known and known:sub(1, #generation + 1) == generation .. ':' then
      local key = known:sub(#generation + 2)
      if key == '' then
        free_page(name, rank, page)
        add(name, 'cooling:' .. rank, -1)
      else
        local record = load(name, {key})[key]
        if record and not record.done then
          free_slot(name, key, record, rank)
          add(name, 'expired', 1)
        end
      end
    end
  end
end

-- Backwards, so that a prompt's first block outlives the blocks that need it.
local function use(name, keys, records)
  local scores = {}
  for i, key in ipairs(keys) do
    if records[key] and records[key].done then
      scores[#scores + 1] = text(now + #keys - i)
      scores[#scores + 1] = key
    end
  end
  in_chunks('ZADD', of(name, 'use'), scores)
end

local function take_leases(name, keys, records, read_lease)
  for _, key in ipairs(keys) do
    local record = records[key]
    if record and record.done then
      record.l = math.max(record.l, now + read_lease)
      save(name, key, record)
    end
  end
  lease_until(name, now + read_lease)
end

local function evict(name, rank, count, pages)
  if now < (fact(name, 'no_victim') or 0) then return end
  local goal, skipped, earliest = count + math.floor(pages / 256), 0, math.huge
  while goal > 0 do
    local oldest = call('ZRANGE', of(name, 'use'), skipped, skipped + 255, 'WITHSCORES')
    if #oldest == 0 then break end
    for i = 1, #oldest, 2 do
      local key = oldest[i]
      local record = load(name, {key})[key]
      if goal <= 0 then return end
      if record.l <= now then
        drop(name, key, record)
        add(name, 'evicted', 1)
        if record.h == 0 then add(name, 'evicted_unread', 1) end
        set_fact(name, 'evicted_idle', math.max(0, now - oldest[i + 1]))
        goal = goal - 1
      else
        skipped = skipped + 1
        earliest = math.min(earliest, record.l)
      end
    end
  end
  -- Else a store full of leased keys would be searched through by every allocation.
  if goal > 0 then set_fact(name, 'no_victim', math.min(earliest, now + 100000)) end
end

local operations = {}

function operations.initialize(name, rank, num_pages, world, max_pages, max_namespaces)
  local known = fact(name, 'world')
  if known and known ~= world then
    fail('conflict', 'namespace "' .. name .. '" has world size ' .. text(known) .. ', not '
      .. text(world) .. ': use another namespace, or clear this one first')
  end
  local pages = known and fact(name, 'pages:' .. text(rank))
  if pages then
    if pages ~= num_pages then
      fail('conflict', 'rank ' .. text(rank) .. ' has ' .. text(pages) .. ' pages, not '
        .. text(num_pages) .. ': use the same file size, another namespace, or clear this one first')
    end
    return true
  end
  if not known and call('SCARD', 'kvloom:namespaces') >= max_namespaces then
    fail('metadata', text(max_namespaces) .. ' namespaces are the limit: clear one first')
  end
  local total = tonumber(call('GET', 'kvloom:pages') or 0)
  if total + num_pages > max_pages then
    fail('metadata', text(num_pages) .. ' pages on top of ' .. text(total)
      .. ' go beyond the limit of ' .. text(max_pages) .. ': raise --max-pages')
  end
  call('SET', 'kvloom:generation', text(now), 'NX')
  call('INCRBY', 'kvloom:pages', text(num_pages))
  if not known then
    call('SADD', 'kvloom:namespaces', name)
    set_fact(name, 'world', world)
    set_fact(name, 'closed', tonumber(call('HGET', 'kvloom:closed', name) or 0))
    call('HDEL', 'kvloom:closed', name)
  end
  set_fact(name, 'pages:' .. text(rank), num_pages)
  set_fact(name, 'next:' .. text(rank), 0)
  return true
end

function operations.allocate(name, rank, writer, keys, lease_existing, write_lease, read_lease)
  local pages = pages_of(name, rank)
  local at, deadline = text(rank), now + write_lease
  expire(name)
  local records, answers, wanted, asked = load(name, keys), {}, {}, {}
  use(name, keys, records)
  if lease_existing then take_leases(name, keys, records, read_lease) end
  for i, key in ipairs(keys) do
    local slot = records[key] and records[key].s[at]
    if not slot then
      if not asked[key] then wanted[#wanted + 1] = key end
      asked[key] = true
    elseif slot[CONFIRMED] or slot[WRITER] == writer then
      answers[i] = {slot[CONFIRMED] and 'exists' or 'write', slot[PAGE], slot[GENERATION]}
      if not records[key].done then
        slot[DEADLINE] = deadline
        call('ZADD', of(name, 'leases'), text(deadline), member(at, slot))
        save(name, key, records[key])
      end
    else
      answers[i] = {'busy', -1, -1}
    end
  end
  lease_until(name, deadline)
  local granted = {}
  if #wanted > 0 and now >= (fact(name, 'closed') or 0) then
    local free_list, next_page = of(name, 'free:' .. at), fact(name, 'next:' .. at)
    local free = call('LLEN', free_list) + pages - next_page
    if #wanted > free then evict(name, at, #wanted - free, pages) end
    for _, key in ipairs(wanted) do
      local page = tonumber(call('LPOP', free_list) or nil)
      if not page and next_page < pages then
        page = next_page
        next_page = next_page + 1
      end
      if not page then break end
      local generation = call('INCR', 'kvloom:generation')
      local record = records[key] or {s = {}, n = 0, l = 0, h = 0, done = false}
      record.s[at] = {page, generation, writer, false, deadline}
      records[key] = record
      save(name, key, record)
      call('HSET', of(name, 'slots:' .. at), text(page), text(generation) .. ':' .. key)
      call('ZADD', of(name, 'leases'), text(deadline), member(at, record.s[at]))
      granted[key] = {'write', page, generation}
    end
    set_fact(name, 'next:' .. at, next_page)
  end
  for i, key in ipairs(keys) do
    answers[i] = answers[i] or granted[key] or {'full', -1, -1}
  end
  return answers
end

-- The slot an item {key, page, generation} names, and its record.
local function slot_of(records, at, item)
  local record = records[item[1]]
  local slot = record and record.s[at]
  if slot and slot[PAGE] == item[2] and (item[3] == -1 or item[3] == slot[GENERATION]) then
    return slot, record
  end
end

local function keys_of(items)
  local keys = {}
  for i, item in ipairs(items) do keys[i] = item[1] end
  return keys
end

function operations.confirm(name, rank, writer, items, write_lease)
  pages_of(name, rank)
  local at, world, keys = text(rank), world_of(name), keys_of(items)
  local records, answers, refused = load(name, keys), {}, 0
  for i, item in ipairs(items) do
    local slot, record = slot_of(records, at, item)
    local mine = slot and (slot[CONFIRMED] or slot[WRITER] == writer) or false
    answers[i] = mine
    if not mine then
      refused = refused + 1
    elseif not slot[CONFIRMED] then
      slot[CONFIRMED], slot[DEADLINE] = true, now + write_lease
      add(name, 'confirmed:' .. at, 1)
      record.n = record.n + 1
      record.done = record.n == world
      if record.done then
        call('ZADD', of(name, 'use'), text(now + #items - i), item[1])
        for each, other in pairs(record.s) do
          call('ZREM', of(name, 'leases'), member(each, other))
        end
      else
        call('ZADD', of(name, 'leases'), text(slot[DEADLINE]), member(at, slot))
      end
      save(name, item[1], record)
    end
  end
  add(name, 'refused', refused)
  return answers
end

function operations.release(name, rank, writer, items)
  pages_of(name, rank)
  local at, count = text(rank), 0
  for _, item in ipairs(items) do
    -- API v1 names no key, and writes complete keys anew: that failed, so the page is torn.
    local torn = item[1] == ''
    if torn then
      local known = call('HGET', of(name, 'slots:' .. at), text(item[2])) or ':'
      item[1] = known:match('^%d*:(.*)$')
    end
    local slot, record = slot_of(load(name, {item[1]}), at, item)
    if slot and torn and record.done then
      cool(name, item[1], record)
      count = count + 1
    elseif slot and (slot[CONFIRMED] and torn or not slot[CONFIRMED] and slot[WRITER] == writer) then
      -- What is not complete nobody reads, and its other ranks' pages may be being written.
      free_slot(name, item[1], record, at)
      count = count + 1
    end
  end
  return count
end

function operations.exists(name, keys, lease, read_lease)
  world_of(name)
  local records, answers = load(name, keys), {}
  for i, key in ipairs(keys) do answers[i] = records[key] ~= nil and records[key].done end
  use(name, keys, records)
  if lease then take_leases(name, keys, records, read_lease) end
  return answers
end

function operations.locations(name, rank, keys, read_lease)
  pages_of(name, rank)
  local at, records, answers, hits = text(rank), load(name, keys), {}, 0
  for i, key in ipairs(keys) do
    local record = records[key]
    answers[i] = false
    if record and record.done then
      record.h = record.h + 1
      hits = hits + 1
      answers[i] = {record.s[at][PAGE], record.s[at][GENERATION]}
    end
  end
  use(name, keys, records)
  take_leases(name, keys, records, read_lease)
  add(name, 'hits', hits)
  add(name, 'misses', #keys - hits)
  return answers
end

function operations.touch(name, keys, read_lease)
  local count = 0
  for _, found in ipairs(operations.exists(name, keys, true, read_lease)) do
    if found then count = count + 1 end
  end
  return count
end

function operations.delete(name, keys)
  world_of(name)
  local records, count = load(name, keys), 0
  for key, record in pairs(records) do
    if record.done then
      count = count + 1
      if record.l > now then cool(name, key, record) else drop(name, key, record) end
    end
  end
  return count
end

function operations.clear(name)
  local world = world_of(name)
  local last = fact(name, 'last') or 0
  if last > now then call('HSET', 'kvloom:closed', name, text(last)) end
  for rank = 0, world - 1 do
    local at = text(rank)
    call('DECRBY', 'kvloom:pages', text(fact(name, 'pages:' .. at) or 0))
    call('UNLINK', of(name, 'slots:' .. at), of(name, 'free:' .. at))
  end
  call('UNLINK', of(name, 'facts'), of(name, 'keys'), of(name, 'use'), of(name, 'leases'))
  call('SREM', 'kvloom:namespaces', name)
  return true
end

function operations.namespaces()
  local names = call('SMEMBERS', 'kvloom:namespaces')
  table.sort(names)
  return names
end

function operations.sweep()
  for _, name in ipairs(call('SMEMBERS', 'kvloom:namespaces')) do expire(name) end
  return true
end

function operations.stats(name)
  local world, ranks = world_of(name), {}
  for rank = 0, world - 1 do
    local at = text(rank)
    local pages = fact(name, 'pages:' .. at)
    ranks[rank + 1] = false
    if pages then
      local free = call('LLEN', of(name, 'free:' .. at)) + pages - fact(name, 'next:' .. at)
      local confirmed, cooling = fact(name, 'confirmed:' .. at) or 0, fact(name, 'cooling:' .. at) or 0
      ranks[rank + 1] = {
        pages = pages, free = free, allocated = pages - free - confirmed - cooling,
        confirmed = confirmed, cooling = cooling,
      }
    end
  end
  local complete = call('ZCARD', of(name, 'use'))
  local oldest = call('ZRANGE', of(name, 'use'), 0, 0, 'WITHSCORES')
  return {
    world_size = world, ranks = ranks, complete = complete,
    incomplete = call('HLEN', of(name, 'keys')) - complete,
    hits = fact(name, 'hits') or 0, misses = fact(name, 'misses') or 0,
    least_recent_use_s = oldest[2] and math.max(0, now - oldest[2]) / 1000000 or 0,
    evicted = fact(name, 'evicted') or 0, evicted_unread = fact(name, 'evicted_unread') or 0,
    evicted_idle_s = (fact(name, 'evicted_idle') or 0) / 1000000,
    expired = fact(name, 'expired') or 0, refused = fact(name, 'refused') or 0,
  }
end

function operations.audit(name)
  local world = world_of(name)
  local sums = {pages = 0, free = 0, allocated = 0, confirmed = 0, cooling = 0, leaked = 0, twice = 0}
  for rank = 0, world - 1 do
    local at, held, seen = text(rank), {}, {}
    local pages, next_page = fact(name, 'pages:' .. at) or 0, fact(name, 'next:' .. at) or 0
    sums.pages = sums.pages + pages
    sums.free = sums.free + pages - next_page
    local slots = call('HGETALL', of(name, 'slots:' .. at))
    for i = 1, #slots, 2 do
      local page, known = slots[i], slots[i + 1]
      held[page] = true
      local generation, key = known:match('^(%d+):(.*)$')
      local lease = call('ZSCORE', of(name, 'leases'), at .. ':' .. page .. ':' .. generation)
      local kept = lease and tonumber(lease) > now
      if key == '' then
        sums.cooling = sums.cooling + 1
      else
        local record = load(name, {key})[key]
        local slot = record and record.s[at]
        local mine = slot and text(slot[PAGE]) == page and text(slot[GENERATION]) == generation
        kept = mine and (kept or record.done)
        if mine and slot[CONFIRMED] then
          sums.confirmed = sums.confirmed + 1
        else
          sums.allocated = sums.allocated + 1
        end
      end
      if not kept then sums.leaked = sums.leaked + 1 end
    end
    for _, page in ipairs(call('LRANGE', of(name, 'free:' .. at), 0, -1)) do
      sums.free = sums.free + 1
      if held[page] or seen[page] then sums.twice = sums.twice + 1 end
      seen[page] = true
    end
    for page = 0, next_page - 1 do
      if not held[text(page)] and not seen[text(page)] then sums.leaked = sums.leaked + 1 end
    end
    local records = call('HGETALL', of(name, 'keys'))
    for i = 1, #records, 2 do
      local slot = cmsgpack.unpack(records[i + 1]).s[at]
      local known = slot and call('HGET', of(name, 'slots:' .. at), text(slot[PAGE]))
      if slot and known ~= text(slot[GENERATION]) .. ':' .. records[i] then
        sums.twice = sums.twice + 1
      end
    end
  end
  return sums
end

local done, answer = pcall(operations[ARGV[1]], unpack(cmsgpack.unpack(ARGV[2])))
if done then return cmsgpack.pack({ok = answer}) end
if type(answer) == 'table' and answer.kind then
  return cmsgpack.pack({error = answer.kind, text = answer.why})
end
return redis.error_reply('kvloom: ' .. tostring(type(answer) == 'table' and answer.err or answer))
