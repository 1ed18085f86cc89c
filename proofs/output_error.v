(* The output of attention that drops keys, beside that over all of them; and averages with weights that are a little off.
   Used in docs/soundness.md under "Output of attention". *)

Require Import Certk.sums Certk.value_gram.

Section Output.
Context {key entry : Type}.
Variable keys : list key.
Variable entries : list entry.
Variable w : key -> R.
Variable value : key -> entry -> R.
Variable centre : entry -> R.
Variable radius : R.
Hypothesis weights : forall k, In k keys -> 0 <= w k.
Hypothesis ball : forall k, In k keys -> length_of entries (fun j => value k j - centre j) <= radius.
Hypothesis radius_nonneg : 0 <= radius.
Let length := length_of entries.

Definition average (v : key -> R) (j : entry) := combined keys v value j / total keys v.

(* Distances from a point are at most those from the centre and its own. *)
Lemma average_from v a : (forall k, In k keys -> 0 <= v k) ->
  length (fun j => total keys v * a j - combined keys v value j)
  <= total keys v * (length (fun j => a j - centre j) + radius).
Proof.
  intros V. assert (V0 : 0 <= total keys v) by now apply total_nonneg.
  assert (E : length (fun j => total keys v * a j - combined keys v value j)
    = length (fun j => total keys v * (a j - centre j) + combined keys (fun k => - v k) (fun k j => value k j - centre j) j)).
  { unfold length, length_of, norm. f_equal. apply total_ext. intros j _.
    assert (combined keys (fun k => - v k) (fun k j => value k j - centre j) j
            = centre j * total keys v - combined keys v value j) as ->; [|ring].
    unfold combined. rewrite <- total_times, <- total_minus. apply total_ext. intros. ring. }
  rewrite E. eapply Rle_trans; [apply norm_plus|]. rewrite norm_times by easy.
  rewrite Rmult_plus_distr_l. apply Rplus_le_compat_l.
  eapply Rle_trans; [apply (longest_bound keys entries _ _ radius ball radius_nonneg)|].
  apply Req_le. f_equal. apply total_ext. intros k I. rewrite Rabs_Ropp. apply Rabs_pos_eq. auto.
Qed.

(* The computed output is o, and tau the share of what S drops. *)
Theorem dropped_output S o : 0 < total keys (part S w) ->
  let tau := total keys (part (out S) w) / total keys w in
  length (fun j => o j - average w j)
  <= length (fun j => o j - average (part S w) j) + tau * (length (fun j => o j - centre j) + radius).
Proof.
  intros H tau. pose proof (part_nonneg (out S) keys w weights) as T0.
  pose proof (total_part S keys w) as E.
  set (Z := total keys w) in *. set (K := total keys (part S w)) in *. set (T := total keys (part (out S) w)) in *.
  assert (iZ : 0 < / Z) by (apply Rinv_0_lt_compat; lra).
  (* o - o* = (1 - tau) (o - o_S) + (T o - sum over T) / Z *)
  assert (D : length (fun j => o j - average w j)
    = length (fun j => (1 - tau) * (o j - average (part S w) j)
                       + / Z * (T * o j - combined keys (part (out S) w) value j))).
  { unfold length, length_of, norm. f_equal. apply total_ext. intros j _.
    assert (P : combined keys w value j = combined keys (part S w) value j + combined keys (part (out S) w) value j).
    { unfold combined. rewrite <- total_plus. apply total_ext. intros k _. unfold part, out. destruct (S k); simpl; ring. }
    unfold average. fold Z K. rewrite P. unfold tau. fold T Z. rewrite E. field. lra. }
  assert (t1 : 0 <= 1 - tau <= 1).
  { unfold tau. fold T Z. assert (T / Z = T * / Z) by reflexivity.
    assert (Z * / Z = 1) by (field; lra). nra. }
  rewrite D. eapply Rle_trans; [apply norm_plus|].
  rewrite norm_times by lra. rewrite norm_times by lra. apply Rplus_le_compat.
  - pose proof (norm_nonneg entries (fun j => o j - average (part S w) j)) as L.
    unfold length, length_of. nra.
  - unfold tau. fold T Z.
    apply Rle_trans with (/ Z * (T * (length (fun j => o j - centre j) + radius))); [|right; unfold Rdiv; ring].
    apply Rmult_le_compat_l; [lra|]. apply average_from.
    intros k I. unfold part. destruct (out S k); [auto | lra].
Qed.

(* Values are in the mean as far from their average as from the centre, or less. *)
Lemma mean_square_distance : 0 < total keys w ->
  total keys (fun k => w k * dot entries (fun j => value k j - average w j) (fun j => value k j - average w j))
  <= total keys w * (radius * radius).
Proof.
  intros Z0.
  apply Rle_trans with (total keys (fun k => w k * dot entries (fun j => value k j - centre j) (fun j => value k j - centre j))).
  - unfold dot.
    assert (X : forall a, total keys (fun k => w k * total entries (fun j => (value k j - a j) * (value k j - a j)))
                = total entries (fun j => total keys (fun k => w k * ((value k j - a j) * (value k j - a j))))).
    { intros a. rewrite <- total_swap. apply total_ext. intros k _. symmetry. apply total_times. }
    rewrite (X (average w)), (X centre). apply total_le. intros j _.
    set (m := combined keys w value j). set (Z := total keys w) in *.
    assert (Q : forall a, total keys (fun k => w k * ((value k j - a) * (value k j - a)))
      = total keys (fun k => w k * (value k j * value k j)) - 2 * a * m + a * a * Z).
    { intros a. unfold m, Z, combined. rewrite <- !total_times, <- total_minus, <- total_plus.
      apply total_ext. intros. ring. }
    rewrite !Q. unfold average. fold m Z.
    assert (m = m / Z * Z) as M by (field; lra). set (b := m / Z) in *.
    pose proof (square_nonneg (b - centre j)). rewrite M. nra.
  - rewrite Rmult_comm, <- total_times. apply total_le. intros k I. rewrite Rmult_comm.
    apply Rmult_le_compat_r; [auto|]. rewrite dot_self.
    pose proof (ball k I). pose proof (norm_nonneg entries (fun j => value k j - centre j)).
    apply Rmult_le_compat; assumption.
Qed.

(* Weights that are off by factors within 1 +- delta. *)
Theorem average_of_factors factor delta : 0 <= delta < 1 -> 0 < total keys w ->
  (forall k, In k keys -> Rabs (factor k - 1) <= delta) ->
  length (fun j => average (fun k => w k * factor k) j - average w j) <= delta / (1 - delta) * radius.
Proof.
  intros D Z0 B. set (o := average w). set (Z := total keys w) in *.
  set (Z' := total keys (fun k => w k * factor k)).
  assert (ZZ : (1 - delta) * Z <= Z').
  { unfold Z, Z'. rewrite <- total_times. apply total_le. intros k I.
    destruct (abs_bounds _ _ (B k I)). specialize (weights k I). nra. }
  assert (0 < Z') by nra.
  (* Z' times the difference is the sum of w (factor - 1) (v - o). *)
  assert (E : length (fun j => average (fun k => w k * factor k) j - o j)
    = / Z' * length (combined keys (fun k => w k * (factor k - 1)) (fun k j => value k j - o j))).
  { unfold length, length_of. rewrite <- norm_times by (left; now apply Rinv_0_lt_compat). unfold norm.
    f_equal. apply total_ext. intros j _.
    assert (average (fun k => w k * factor k) j - o j
      = / Z' * combined keys (fun k => w k * (factor k - 1)) (fun k j => value k j - o j) j) as ->; [|reflexivity].
    assert (combined keys (fun k => w k * (factor k - 1)) (fun k j => value k j - o j) j
      = (combined keys (fun k => w k * factor k) value j - combined keys w value j) - o j * (Z' - Z)) as ->.
    { unfold combined, Z, Z'. rewrite <- !total_minus, <- total_times, <- total_minus. apply total_ext. intros. ring. }
    assert (combined keys w value j = o j * Z) as -> by (unfold o, average; fold Z; field; lra).
    unfold average. fold Z'. field. lra. }
  rewrite E.
  assert (L : length (combined keys (fun k => w k * (factor k - 1)) (fun k j => value k j - o j)) <= delta * (Z * radius)).
  { set (z := combined keys (fun k => w k * (factor k - 1)) (fun k j => value k j - o j)).
    assert (Z * radius >= 0) by nra.
    apply (length_le entries); [nra|]. unfold z at 1. rewrite dot_combined. fold z.
    set (far := fun k => length (fun j => value k j - o j)).
    assert (far0 : forall k, 0 <= far k) by (intros; apply norm_nonneg).
    assert (z0 : 0 <= length z) by apply norm_nonneg.
    apply Rle_trans with (delta * length z * total keys (fun k => w k * far k)).
    - eapply Rle_trans; [apply Rle_abs|]. eapply Rle_trans; [apply total_abs|]. rewrite <- total_times.
      apply total_le. intros k I. specialize (weights k I). rewrite !Rabs_mult, (Rabs_pos_eq (w k)) by easy.
      pose proof (dot_le entries (fun j => value k j - o j) z) as DL. fold length in DL. fold (far k) in DL.
      specialize (B k I). pose proof (Rabs_pos (factor k - 1)).
      pose proof (Rabs_pos (dot entries (fun j => value k j - o j) z)).
      replace (delta * length z * (w k * far k)) with (w k * delta * (far k * length z)) by ring.
      apply Rmult_le_compat; [apply Rmult_le_pos; lra | easy | apply Rmult_le_compat_l; lra | exact DL].
    - (* The mean of distances is at most the root of the mean of their squares. *)
      assert (M : total keys (fun k => w k * far k) <= Z * radius).
      { pose proof (cauchy_schwarz keys (fun k => sqrt (w k)) (fun k => sqrt (w k) * far k)) as CS.
        rewrite (total_ext _ (fun k => sqrt (w k) * (sqrt (w k) * far k)) (fun k => w k * far k)) in CS
          by (intros k I; rewrite <- Rmult_assoc, sqrt_sqrt by auto; ring).
        rewrite (total_ext _ (fun k => sqrt (w k) * sqrt (w k)) w) in CS by (intros k I; apply sqrt_sqrt; auto).
        rewrite (total_ext _ (fun k => sqrt (w k) * far k * (sqrt (w k) * far k))
          (fun k => w k * dot entries (fun j => value k j - o j) (fun j => value k j - o j))) in CS.
        2: { intros k I. rewrite dot_self. fold length. fold (far k).
             replace (sqrt (w k) * far k * (sqrt (w k) * far k)) with (sqrt (w k) * sqrt (w k) * (far k * far k)) by ring.
             now rewrite sqrt_sqrt by auto. }
        eapply Rle_trans; [apply Rle_abs|]. eapply Rle_trans; [exact CS|]. fold Z.
        apply Rle_trans with (sqrt Z * sqrt (Z * (radius * radius))).
        - apply Rmult_le_compat_l; [apply sqrt_pos|]. apply sqrt_le_1_alt, mean_square_distance, Z0.
        - rewrite <- sqrt_mult by nra. replace (Z * (Z * (radius * radius))) with ((Z * radius) * (Z * radius)) by ring.
          rewrite sqrt_square by nra. lra. }
      replace (delta * (Z * radius) * length_of entries z) with (delta * length z * (Z * radius)) by (unfold length; ring).
      apply Rmult_le_compat_l; [nra | exact M]. }
  apply Rmult_le_reg_l with Z'; [easy|]. rewrite <- Rmult_assoc, Rinv_r, Rmult_1_l by lra.
  eapply Rle_trans; [exact L|].
  assert (0 <= delta / (1 - delta) * radius).
  { apply Rmult_le_pos; [|easy]. apply Rmult_le_pos; [lra | left; apply Rinv_0_lt_compat; lra]. }
  apply Rle_trans with ((1 - delta) * Z * (delta / (1 - delta) * radius)); [right; field; lra|].
  now apply Rmult_le_compat_r.
Qed.
End Output.
